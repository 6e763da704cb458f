"""``python -m pipeline`` is the command ``mixshards``."""

from .cli import main

main()
