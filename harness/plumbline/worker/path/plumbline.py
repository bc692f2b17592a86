"""Makes ``import plumbline`` find the package around this file, if this folder is on ``sys.path``.

It hides everything beside the package, which may be another environment's site-packages.
"""

import importlib.util
import sys
from pathlib import Path

_package = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "plumbline", _package / "__init__.py", submodule_search_locations=[str(_package)]
)
assert _spec is not None
assert _spec.loader is not None
# ``import`` returns the entry of sys.modules, which is now the package instead of this file.
sys.modules["plumbline"] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
