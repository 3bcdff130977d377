"""Imported first by the fork server: from then on it ends at the very moment its parent does."""

from paceline.core.processes import end_with_parent

end_with_parent()
