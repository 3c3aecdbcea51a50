"""A Hugging Face hub over its own library, which alone knows endpoint, token, proxy and caches.

Loaded by name, only where something has to be fetched: the library is the extra ``hub``. It reads
``HF_TOKEN`` and ``HF_ENDPOINT`` from the environment; no message of ours has the token in it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its HTTP library
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from pdserve.core.errors import ModelFilesError, ModelNotFoundError
from pdserve.models.hub_repo import HubFile, HubModel, HubRepo, is_commit

LOOK_UP_TIMEOUT_S = 30.0


def connect() -> "HuggingFaceHub":
    """The hub that the environment names; nothing is asked yet."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HuggingFaceHub(HfApi(library_name="pdserve"))


class HuggingFaceHub:
    """A ``Hub``."""

    def __init__(self, api: HfApi) -> None:
        self._api = api

    def look_up(self, model: HubModel) -> HubRepo:
        with self._named_errors(model):
            info = self._api.model_info(
                model.repo_id,
                revision=model.revision,
                files_metadata=True,
                timeout=LOOK_UP_TIMEOUT_S,
            )
        commit = info.sha or ""
        if not is_commit(commit):
            raise ModelFilesError(
                f"{model}: {self._api.endpoint} says that it is at commit {commit!r}, which is none"
            )
        files = tuple(
            HubFile(
                name=file.rfilename,
                size_bytes=file.size,
                sha256=file.lfs.sha256 if file.lfs is not None else None,
            )
            for file in info.siblings or []
            if file.size is not None
        )
        return HubRepo(commit=commit, files=files)

    def download(self, model: HubModel, commit: str, name: str, folder: str) -> None:
        with self._named_errors(model):
            self._api.hf_hub_download(model.repo_id, name, revision=commit, local_dir=folder)

    @contextmanager
    def _named_errors(self, model: HubModel) -> Iterator[None]:
        """What the library raises, said by what to do about it."""
        where = self._api.endpoint
        try:
            yield
        except GatedRepoError as error:
            raise ModelNotFoundError(
                f"{model} is gated: ask for access at {where}/{model.repo_id}, and give a token of "
                f"an account that has it in HF_TOKEN ({_token_state()})"
            ) from error
        except RevisionNotFoundError as error:
            raise ModelNotFoundError(
                f"{model}: {where} has no such revision of {model.repo_id}"
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelNotFoundError(
                f"{model}: {where} has no such model, or it is private and needs a token in "
                f"HF_TOKEN ({_token_state()})"
            ) from error
        except HFValidationError as error:
            raise ModelNotFoundError(f"{model}: no hub id: {error}") from error
        except HfHubHTTPError as error:
            raise ModelFilesError(f"{model}: {where} {_answered(error)}") from error
        except (LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
            raise ModelFilesError(
                f"{model}: {where} cannot be reached, or hung up ({_cause(error)}); try again, or "
                "put the model's directory on this host by other means and name its path"
            ) from error
        except EntryNotFoundError as error:
            raise ModelFilesError(f"{model}: {where} has lost a file that it lists") from error


def _token_state() -> str:
    return "one is set, and was refused" if get_token() else "none is set"


def _answered(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return f"refused ({status}); it wants a token in HF_TOKEN ({_token_state()})"
    return f"answered {status}"


def _cause(error: BaseException) -> str:
    """The innermost reason, by its class and first line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}".splitlines()[0]
