"""The OpenAPI document of the routes, for clients and testing tools that read one.

Made from the routes and from the schemas that their bodies are checked with; what a route takes is
told here, because routes read their bodies themselves. Invariant: every route that takes a body or
a query is listed (a test compares), so that the document tells all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem.api.adapters import AdapterRequest, ImportRequest, RollBackRequest
from tandem.api.batches import CreateBatchRequest
from tandem.api.errors import MESSAGES
from tandem.api.feedback import FeedbackRequest
from tandem.api.fine_tuning import CreateJobRequest
from tandem.api.guard import OPEN_ROUTES
from tandem.api.messages.schemas import CountRequest, MessagesRequest
from tandem.api.responses.schemas import ResponsesRequest
from tandem.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
)

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    MESSAGES: MessagesRequest,
    f"{MESSAGES}/count_tokens": CountRequest,
    "/v1/adapters/{name}": AdapterRequest,
    "/v1/adapters/{name}/load": LoadAdapterRequest,
    "/v1/adapters/{name}/import": ImportRequest,
    "/v1/adapters/{name}/rollback": RollBackRequest,
    "/v1/feedback": FeedbackRequest,
    "/v1/batches": CreateBatchRequest,
    "/v1/fine_tuning/jobs": CreateJobRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What the POST of a route takes."""
WITHOUT_BODY = frozenset(
    (
        "/v1/adapters/{name}/versions/{version}/publish",
        "/v1/adapters/{name}/versions/{version}/refuse",
        "/v1/batches/{batch_id}/cancel",
        "/v1/fine_tuning/jobs/{job_id}/cancel",
        "/v1/fine_tuning/jobs/{job_id}/pause",
        "/v1/fine_tuning/jobs/{job_id}/resume",
    )
)
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_WHOSE = {"adapter": _TEXT, "user": _TEXT, "keys": {"enum": ["all"]}}
QUERIES: Mapping[tuple[str, str], Mapping[str, dict[str, Any]]] = {
    ("GET", "/v1/adapters/{name}/events"): {"limit": _NUMBER, "before": _NUMBER},
    ("GET", "/v1/stats/iterations"): {"limit": _NUMBER, "after": _NUMBER},
    ("GET", "/v1/batches"): {"limit": _NUMBER, "after": _TEXT},
    ("GET", "/v1/feedback"): {**_WHOSE, "state": _TEXT, "limit": _NUMBER, "after": _TEXT},
    ("DELETE", "/v1/feedback"): _WHOSE,
    ("GET", "/v1/files"): {
        "purpose": _TEXT,
        "limit": _NUMBER,
        "order": {"enum": ["asc", "desc"]},
        "after": _TEXT,
    },
    ("GET", "/v1/fine_tuning/jobs"): {"limit": _NUMBER, "after": _TEXT},
    ("GET", "/v1/fine_tuning/jobs/{job_id}/events"): {"limit": _NUMBER, "after": _TEXT},
    ("GET", "/v1/fine_tuning/jobs/{job_id}/checkpoints"): {"limit": _NUMBER, "after": _TEXT},
}
_UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["fine-tune", "batch", "user_data"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_MESSAGES_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["error"]},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_STATUSES = {
    "400": "a field is wrong",
    "401": "the API key is missing or unknown",
    "403": "the API key, page or host may not do this",
    "404": "there is no such thing",
    "405": "wrong method",
    "408": "the body did not come in time",
    "409": "the state does not allow this",
    "413": "the body is too large",
    "415": "the body has the wrong type",
    "429": "too much waits",
    "500": "this answer failed",
    "503": "the engine is not there",
}
_PLAIN = re.compile(r"{(\w+)(?::\w+)?}")


def specification(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of all routes of `app`."""
    found, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods or ()):
                path = _PLAIN.sub(r"{\1}", route.path)
                body = _body(method, route.path, found)
                paths.setdefault(path, {})[method.lower()] = _operation(method, route, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": "1",
            "description": "docs/api.md says what each means",
        },
        "paths": paths,
        "components": {
            "schemas": {
                **schemas.get("$defs", {}),
                "Error": _ERROR,
                "MessagesError": _MESSAGES_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _body(method: str, path: str, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any] | None:
    if method != "POST" or path in WITHOUT_BODY:
        return None
    if path in BODIES:
        content = {"application/json": {"schema": schemas[BODIES[path], "validation"]}}
    else:
        content = {"multipart/form-data": {"schema": _UPLOAD}}
    return {"required": True, "content": content}


def _operation(method: str, route: APIRoute, body: dict[str, Any] | None) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _of_path(name)}
        for name in _PLAIN.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in QUERIES.get((method, route.path), {}).items()
    ]
    shape = "MessagesError" if route.path.startswith(MESSAGES) else "Error"
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    responses: dict[str, Any] = {
        status: {"description": meaning, "content": refusal}
        for status, meaning in _STATUSES.items()
    }
    accepted = (method, route.path) == ("POST", "/v1/feedback")
    responses["202" if accepted else "200"] = {"description": "done"}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (route.endpoint.__doc__ or "").strip().split("\n")[0],
        "parameters": parameters,
        "responses": responses,
    }
    if body is not None:
        operation["requestBody"] = body
    if route.path in OPEN_ROUTES:
        operation["security"] = []
    return operation


def _of_path(name: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0} if name == "version" else {"type": "string"}
