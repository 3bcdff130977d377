"""Make packages appear as not installed in the process that imports this module. The fork server
imports it before transformers and peft, which import bitsandbytes and torchao if these are
installed.
"""

import logging
import os

from paceline.config.packages import hide_packages

for package in ("bitsandbytes", "torchao"):  # they warn about optional kernels
    logging.getLogger(package).setLevel(logging.ERROR)
hide_packages(os.environ.get("PACELINE_HIDDEN_PACKAGES", "").split())
