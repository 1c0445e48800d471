"""How properties are searched: the same examples every time in `make test`, other ones each time in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

# No deadline: how long an example takes says more about what else this machine does.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile("steady")
