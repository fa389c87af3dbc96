"""`python -m noiser`: the same as the command `noiser`."""

from noiser.cli import app

if __name__ == "__main__":
    app(prog_name="noiser")
