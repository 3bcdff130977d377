"""Imported first by the fork server: from then on the server ends when its parent does."""

import os

from paceline.core.processes import end_with_parent

end_with_parent()
if os.environ.get("PACELINE_FORK_SERVER_PARENT", str(os.getppid())) != str(os.getppid()):
    os._exit(1)  # the parent ended before that took effect
