"""The permissions of a key."""

from __future__ import annotations

from quire.server.errors import BadRequest, Forbidden, TooManyRequests
from quire.server.keys import needs
from quire.server.keys.account import key_of
from quire.server.keys.caller import Caller
from quire.server.keys.key import Key
from quire.server.queue_wait import retry_after


def require_model(caller: Caller, name: str | None, state: needs.Choice) -> None:
    """Raise NotFound unless `name` is absent, empty or a name of the model, Forbidden if the request's key may not ask
    for it.
    """
    key = key_of(caller, state)
    state.require_model(name, visible_names(key, state))
    if key is not None:
        check_model(key, name, state)


def check_model(key: Key, model: str | None, state: needs.Names) -> None:
    """Raise Forbidden unless the key may ask for the model by this name; without one, by any of its names."""
    if key.models is None:
        return
    allowed = model in key.models if model else any(name in key.models for name in (*state.names, *state.aliases))
    if not allowed:
        raise Forbidden(
            f"The key '{key.name}' has no access to the model '{(model or state.names[0])[:200]}' (models).",
            param="model",
            code="model_not_found",
        )


def names_for(caller: Caller, state: needs.Choice) -> list[str]:
    """Return the names that the API lists for the request's key."""
    return visible_names(key_of(caller, state), state)


def visible_names(key: Key | None, state: needs.Names) -> list[str]:
    """Return the same of a key; with aliases that it was given by name."""
    if key is None or key.models is None:
        return state.all_names
    return [name for name in (*state.all_names, *sorted(state.aliases)) if name in key.models]


def check_queue(key: Key, num_choices: int, state: needs.Reservation) -> None:
    """Raise TooManyRequests if the server is full, and more choices of the key would wait than it may have waiting."""
    limit = key.max_queued_requests
    if limit is None or not state.would_wait(num_choices):
        return
    count = state.num_waiting_of[key.name] + num_choices
    if count > limit:
        error = TooManyRequests(
            f"With this request {count} choices of '{key.name}' would wait, and its limit is {limit} "
            "(max_queued_requests).",
            retry_after=retry_after(state.queue_wait.seconds(count - num_choices)),
        )
        if state.metrics is not None:
            state.metrics.observe_key_refusal(key.name, error.code)
        raise error


def allowed_priority(key: Key, priority: int | None, are_used: bool) -> int | None:
    """Return the priority of a request: by default 0, or the most urgent that the key may have, if the scheduler uses
    priorities. Raises BadRequest.
    """
    lowest = key.max_priority
    if priority is None:
        return max(0, lowest) if lowest is not None and are_used else None
    if lowest is not None and priority < lowest:
        raise BadRequest(
            f"priority must be at least {lowest} for the key '{key.name}' (max_priority), not {priority}: lower ones "
            "run first.",
            param="priority",
        )
    return priority
