"""Three prompts, the built-in model, three heat maps."""

import noiser

PROMPTS = (
    "LeBron James professionally plays the sport of",
    "The Eiffel Tower is a famous landmark in the city of",
    "To repair the leaking roof before winter, the carpenter climbed up the",
)


def main() -> None:
    """Prints the attribution of each prompt."""
    lm = noiser.load_model("gemma-3-270m")
    for prompt in PROMPTS:
        print(noiser.attribute(lm, prompt, unit="word"), end="\n\n")


if __name__ == "__main__":
    main()
