"""How properties are searched: the same examples every time in `make test`, other ones each time in `make test-all`.

And how tests spend less of a processor: see `halves`, and the collector of garbage.
"""

from __future__ import annotations

import gc
import sys

from hypothesis import settings

# No deadline: how long an example takes says more about what else this machine does.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("searching", deadline=None)
settings.load_profile("steady")

gc.disable()  # what is imported and collected stays


def pytest_collection_finish() -> None:
    """What exists by now is not scanned again and again: a million objects, a twentieth of the time of all tests."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        from halves import quick_products

        quick_products()
