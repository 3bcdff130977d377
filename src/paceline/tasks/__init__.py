"""The tasks."""
def load_task(config):
    from paceline.tasks.language import LanguageTask
    return LanguageTask(config)
