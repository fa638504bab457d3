"""What a key may ask for."""

from __future__ import annotations

from quire.server.errors import BadRequest, Forbidden
from quire.server.keys.key import Key
from quire.server.state import ServerState


def check_model(key: Key, model: str | None, state: ServerState) -> None:
    """Raises Forbidden unless the key may ask for the model by this name; without one, by any of its names."""
    if key.models is None:
        return
    allowed = model in key.models if model else any(name in key.models for name in (*state.names, *state.aliases))
    if not allowed:
        raise Forbidden(
            f"The key '{key.name}' has no access to the model '{(model or state.names[0])[:200]}' (models).",
            param="model",
            code="model_not_found",
        )


def allowed_priority(key: Key, priority: int | None, are_used: bool) -> int | None:
    """The priority of a request: by default 0, or the most urgent that the key may have, if the scheduler uses
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
