"""A data set: two prompts."""

from noiser.data import DATA_SETS, Example, LoadedExamples, Provenance, Recipe

PROMPTS = ("The brown fox sings in the", "The dog plays in the rain and the")


def read(paths):
    """The examples."""
    return LoadedExamples(
        [
            Example(id=f"two-{number}", prompt=prompt, target=None, dataset="two")
            for number, prompt in enumerate(PROMPTS)
        ]
    )


def two():
    """Where it comes from, and how it is read."""
    return Recipe(source=Provenance(files=(), licence="CC0", citation="none"), read=read)


DATA_SETS.register("two", two, summary="two prompts")
