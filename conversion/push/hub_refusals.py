"""The Hub's refusals of a push, with advice."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hf_hyperconn.errors import HyperConnError, PushError

from ..checkpoint.source import LOCAL_ERRORS

RUN_AGAIN = "Run the same command again. Files already uploaded stay there."


@contextmanager
def explain_hub_errors(repo_id: str) -> Iterator[None]:
    """Raise the errors of huggingface_hub as a `PushError` with advice.

    repo_id: the repo that is written to.
    """
    from huggingface_hub import errors

    try:
        yield
    except HyperConnError:
        raise
    except RuntimeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise PushError(_advice(repo_id, error.__cause__)) from error  # of one file, sent in a thread
    except (errors.HTTPError, OSError) as error:
        raise PushError(_advice(repo_id, error)) from error
    except errors.HFValidationError as error:
        raise PushError(f"repo must be owner/name (got {repo_id!r}): {error}") from error
    except ValueError as error:  # full storage, or a card's metadata that the Hub can't read
        raise PushError(f"the Hub refuses to write to {repo_id!r}: {error} Fix that, and push again.") from error


def refuses_copies(error: Exception, base: str) -> bool:
    """Tell whether the error of a commit is about copying from `base`, not about the target repo."""
    from huggingface_hub.errors import FileDuplicationError, HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return f"/api/models/{base}/" in str(error.response.request.url)
    return isinstance(error, FileDuplicationError)


def _advice(repo_id: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno in (*LOCAL_ERRORS, errno.ENOENT):
        where = f"'{error.filename}'" if error.filename else "a file of this machine"
        return f"{where} can't be read or written: {error.strerror}. Fix that. {RUN_AGAIN}"
    if not isinstance(error, errors.HfHubHTTPError):
        return f"the Hub can't be reached ({type(error).__name__}). Go online. {RUN_AGAIN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id!r} has no such branch. Check --revision; without --create-pr it is made."
    status, said = error.response.status_code, f" ({error.server_message})" if error.server_message else ""
    match status:
        case 401:
            return f"the Hub doesn't know who is writing to {repo_id!r}. Log in with `hf auth login`, or set HF_TOKEN."
        case 403:
            return (
                f"the Hub refuses to write to {repo_id!r}{said}. Log in with a token that may (`hf auth login`), open "
                f"a pull request with --create-pr, or give another repo."
            )
        case 404:
            return f"the Hub doesn't find {repo_id!r}{said}. Check its name, and that your token may write to it."
        case 409 | 412:
            return f"someone else changed {repo_id!r} meanwhile{said}. {RUN_AGAIN}"
        case 402 | 413:
            return f"the Hub takes no more for {repo_id!r}{said}. Free some storage there. {RUN_AGAIN}"
        case _:
            return f"the Hub answered {status}{said}. Wait a little. {RUN_AGAIN}"
