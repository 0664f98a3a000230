"""Names on the command line that may be of a recipe or of a model. Imports neither torch nor transformers."""

from nalanda.config.load import is_recipe
from nalanda.train.resolve import find_run


def is_model(name: str) -> bool:
    """Whether a command that also takes recipes gets a run, a model folder or a hub id."""
    if is_recipe(name):
        return False
    path = find_run(name)
    return path.is_dir() or ("/" in name and not path.is_file())
