"""The one base class of what mixshards raises for a person to read."""


class MixError(Exception):
    """Something about a mix, its config or its sources is wrong; the text says what and where."""


class ReaderError(MixError, ValueError):
    """A mix cannot be read in the way asked for."""
