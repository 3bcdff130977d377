"""Import the modules that ranks need. The fork server imports this module.

Packages that the run does not use appear as not installed: transformers, peft and accelerate import
some of them if they are installed.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

from paceline.core.log import ignore_import_warnings
from paceline.core.user_code import hide_packages


def _import_modules() -> None:
    gc.disable()  # collecting during imports takes a tenth of their time and frees nothing
    try:
        for name in os.environ.get("PACELINE_PRELOAD", "").split():
            with suppress(ImportError):  # the rank that needs the module reports the error
                import_module(name)
        gc.freeze()
    finally:
        gc.enable()


ignore_import_warnings()
hide_packages(os.environ.get("PACELINE_HIDDEN_PACKAGES", "").split())
_import_modules()
