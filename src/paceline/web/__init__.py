"""The panel (``paceline ui``): a server that reads the files of runs, and its page. Runs in
progress are not affected."""
