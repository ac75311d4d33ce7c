"""`python -m smddp …` is the command `smddp …`."""

from smddp.tools.cli import command

if __name__ == "__main__":
    command()
