"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# In continuous integration the same commit is judged by the same examples each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
