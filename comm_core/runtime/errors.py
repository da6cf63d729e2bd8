"""Every error a user can meet. Messages say what was given, what is allowed and what to do."""

from __future__ import annotations


class MTMoEError(Exception):
    """Base class of all errors raised on purpose by this project."""


class UsageError(MTMoEError, ValueError):
    """A setting, argument or input that cannot work.

    Args:
        given: what was passed, with its name and value.
        allowed: what would be accepted.
        fix: what the reader should do next.
    """

    def __init__(self, given: str, *, allowed: str, fix: str) -> None:
        super().__init__(f"{given}; allowed: {allowed}; {fix}")
        self.given, self.allowed, self.fix = given, allowed, fix

    def __reduce__(self) -> tuple[object, ...]:
        return _usage_error, (self.given, self.allowed, self.fix)


def _usage_error(given: str, allowed: str, fix: str) -> UsageError:
    """Rebuilds a UsageError in another process (keyword arguments do not survive pickling)."""
    return UsageError(given, allowed=allowed, fix=fix)


class MissingPackageError(MTMoEError, ImportError):
    """An optional package is needed for what was asked and is not installed."""

    def __init__(self, package: str, *, needed_for: str, install: str) -> None:
        super().__init__(f"{needed_for} needs {package}, which is not installed; install it with: {install}")
        self.package, self.needed_for, self.install = package, needed_for, install

    def __reduce__(self) -> tuple[object, ...]:
        return _missing_package, (self.package, self.needed_for, self.install)


def _missing_package(package: str, needed_for: str, install: str) -> MissingPackageError:
    """Rebuilds a MissingPackageError in another process."""
    return MissingPackageError(package, needed_for=needed_for, install=install)


class CommError(MTMoEError, RuntimeError):
    """Communication failed or the ranks of a group disagree."""


class CommTimeoutError(CommError, TimeoutError):
    """A bounded wait ended without an answer; the message names operation, rank and peers."""


class PeerTimeout(CommTimeoutError):
    """A rank of the group did not answer in time or its process has ended; the message names it."""


class UnavailableError(CommError):
    """What was asked for is not possible between these ranks on this machine; raised on all of them."""


class ClosedError(MTMoEError, RuntimeError):
    """A buffer or pipeline was used after close()."""


class BuildError(MTMoEError, RuntimeError):
    """The kernel library could not be compiled; the message holds the full command and what the compiler said."""
