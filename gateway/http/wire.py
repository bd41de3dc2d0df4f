"""HTTP/1.1 as uvicorn speaks it, but for what it refuses by itself: that has the one shape of an error body too.

Such a request never gets as far as the application: its head is malformed or too large.
"""

import json
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidRequest
from gateway.accounting import request_id
from gateway.http.errors import error_body

#: Seconds in which a client may take note of the answer while it still sends; a closed connection would reset it.
_LINGER = 1.0
_MESSAGES = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the head of the request is too large",
    HTTPStatus.NOT_IMPLEMENTED: "the transfer encoding is not supported",
}


class JsonH11Protocol(H11Protocol):
    """Give its class to uvicorn as `http=`."""

    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def _should_upgrade(self) -> bool:
        """There are no WebSockets here, nor other protocols: an offer to upgrade is ignored, as the standard has it.

        uvicorn would answer handshakes by itself, in plain text, and warn of the others.
        """
        return False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where h11 has raised; the error knows the status."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else HTTPStatus.BAD_REQUEST
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer has begun already.
            self.transport.close()
            return
        self._refused = True
        self._end_cycle()
        self._answer(HTTPStatus(status))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER, self.transport.close)

    def _end_cycle(self) -> None:
        """If the body was what is wrong, the application is waiting for more of it: to it, the client has left."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _answer(self, status: HTTPStatus) -> None:
        message = _MESSAGES.get(status, "this is not a valid HTTP/1.1 request")
        body = json.dumps(error_body(InvalidRequest(message, code="invalid_http_request"))).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", request_id("")),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
