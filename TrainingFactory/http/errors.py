"""Errors as OpenAI's servers tell them."""

from __future__ import annotations

from typing import Any

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """A request that is answered with an error: its status, and in JSON the field that is wrong and why."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
