"""Make the process that imports this module end with its parent. The fork server imports it
first."""

import os

from paceline.core.processes import end_with_parent

end_with_parent()
if os.environ.get("PACELINE_FORK_SERVER_PARENT", str(os.getppid())) != str(os.getppid()):
    os._exit(1)  # the parent ended before that took effect
