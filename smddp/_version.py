"""The version of smddp: setup.py and CMakeLists.txt read it here."""

__version__ = "0.1.0"
