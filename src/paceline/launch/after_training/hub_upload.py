"""Upload a trained model to the Hugging Face hub. Imports no torch."""

import logging
import re
from pathlib import Path

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError, first_line
from paceline.core.hub import endpoint, unreachable
from paceline.core.texts import UserText
from paceline.launch.after_training.model_card import model_card

_LOGIN = (
    "set the environment variable HF_TOKEN to a token with write access, or run `hf auth login`"
)
_REPOSITORY = re.compile(r"([\w-]+/)?\w[\w.-]{0,95}", re.ASCII)

logger = logging.getLogger(__name__)


def repository_of(config: Config) -> str:
    """Return the repository that a run is uploaded to, perhaps without its owner."""
    return config.train_args.hub_model_id or Path(config.output_dir).resolve().name


def check_hub_upload(config: Config) -> None:
    """Raise ConfigError if the model could not be uploaded when the run is done: there is no valid
    token, the hub cannot be reached, or the repository's name is invalid."""
    if not config.train_args.push_to_hub:
        if config.train_args.hub_model_id is not None:
            logger.warning(
                UserText(
                    "`train_args.hub_model_id` has no effect without `push_to_hub: true`",
                    code="hub-id-without-effect",
                )
            )
        return
    setting = "`train_args.push_to_hub: true`"
    if config.use_modelscope:
        raise ConfigError(
            "{setting} is not supported with `use_modelscope: true`: models are uploaded to the"
            " Hugging Face hub",
            code="push-with-modelscope",
            fix="remove one of them, and upload `model/` with the tools of ModelScope",
            setting=setting,
        )
    check_repository(repository_of(config), setting)


def check_repository(repository: str, setting: str) -> None:
    """Raise ConfigError if nothing can be uploaded to the repository, for the reasons of
    :func:`check_hub_upload`."""
    reason = unreachable()
    if reason is not None:
        raise ConfigError(
            "{setting}: {reason}",
            code="hub-unreachable",
            fix="connect to a network, or remove it",
            setting=setting,
            reason=reason,
        )
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(
            "{setting}: `{repository}` is not a name of a repository",
            code="invalid-repository-name",
            allowed="NAME or OWNER/NAME, of letters, digits, `-`, `_` and `.`",
            fix="set `train_args.hub_model_id: OWNER/NAME`",
            setting=setting,
            repository=repository,
        )
    try:
        if get_token() is None:
            raise ConfigError(
                "{setting} needs a token of the hub",
                code="missing-hub-token",
                fix=_LOGIN,
                setting=setting,
            )
        HfApi(endpoint=endpoint()).whoami()
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            "{setting}: the hub does not accept the token: {reason}",
            code="hub-refuses-token",
            fix=_LOGIN,
            setting=setting,
            reason=first_line(error),
        ) from error


def upload_model(
    folder: Path, run: Path, repository: str, private: bool | None = None
) -> tuple[str, str]:
    """Upload a model with its card in one commit. The repository is created if it does not exist.

    Args:
        folder: folder of the model.
        run: folder of the run that the card describes.
        private: whether a new repository is private; None for the account's default.

    Returns:
        The name of the repository with its owner, and the URL of the commit.

    Raises:
        RunError: the upload failed. Nothing was committed then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(endpoint=endpoint())
    try:
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        # peft writes an empty card.
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        operations = [
            CommitOperationAdd(path.relative_to(folder).as_posix(), str(path))
            for path in files
            if path != folder / "README.md"
        ]
        card = model_card(run, folder, repository)
        operations.append(CommitOperationAdd("README.md", card.encode()))
        commit = api.create_commit(
            repository, operations, commit_message="Upload the model with Paceline"
        )
    except Exception as error:  # huggingface_hub raises errors of several libraries
        raise RunError(
            "the model could not be uploaded to {endpoint}: {reason}",
            code="model-upload-failed",
            fix="the model is in {folder}; repeat the upload with `paceline export {run} --push"
            " {repository}`",
            endpoint=endpoint(),
            reason=first_line(error),
            folder=folder,
            run=run,
            repository=repository,
        ) from error
    return repository, str(commit.commit_url)
