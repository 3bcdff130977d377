"""Child processes of the server: training runs, commands, chat workers."""
