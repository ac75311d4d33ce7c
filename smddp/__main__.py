"""`python -m smddp …` is the command `smddp …`."""

from smddp.cli import command

if __name__ == "__main__":
    command()
