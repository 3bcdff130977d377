"""Make packages appear as not installed in the process that imports this module. The fork server
imports it before transformers and peft, which import bitsandbytes and torchao if these are
installed.
"""

import os
import sys

for _name in os.environ.get("PACELINE_HIDDEN_PACKAGES", "").split():
    if _name not in sys.modules:
        # Python's own way to make `import` and `find_spec` report that there is no such module.
        sys.modules[_name] = None  # type: ignore[assignment]
