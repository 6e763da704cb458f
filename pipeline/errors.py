"""The one base class of what mixshards raises for a person to read."""


class MixError(Exception):
    """Something about a mix, its config or its sources is wrong; the text says what and where."""
