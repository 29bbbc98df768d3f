"""--serve: a page in the browser, by the standard library's HTTP server: sample.py's, plan.py's.

A page asks by a POST of JSON that holds all that the answer depends on: the server keeps nothing. The answer
is plain text, piece by piece, one answer at a time. Pages of others are refused, also those whose name was
made to lead here (DNS rebinding).
"""
import contextlib
import html
import http.server
import json
import re
import secrets
import socketserver
import threading
from pathlib import Path

from interface.terminal import one_line, say

OURS = r"(localhost|[\d.]+|\[[\da-f:.]+\]|{})(:\d+)?"  # an address is nobody else's name


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10  # seconds of each read and write

    def handle(self):
        with contextlib.suppress(OSError):  # the client has left
            super().handle()

    def do_GET(self):
        if self.is_ours():
            self.write(200, self.server.page.replace("NONCE", secrets.token_hex()), "text/html")

    def do_POST(self):
        if not self.is_ours():
            return
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.turn:
            try:
                pieces = self.server.talk(json.loads(asked))
            except ValueError as e:
                self.write(400, one_line(e) + "\n")
                return
            self.write(200, "")
            for piece in pieces:
                self.wfile.write(piece.encode())

    def is_ours(self):
        """Whether the page that asks is ours; one of others has another name or origin, and is refused."""
        host = self.headers.get("Host", "").lower()
        origin = self.headers.get("Origin")
        is_ours = re.fullmatch(OURS.format(re.escape(self.server.host)), host)
        if not is_ours or origin not in (None, f"http://{host}", f"https://{host}"):
            self.write(403, "refused: a page from elsewhere asks, or by a name that is not mine (--host)\n")
            return False
        return True

    def write(self, status, text, kind="text/plain"):
        self.send_response_only(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("X-Content-Type-Options", "nosniff")  # a browser that guesses waits for more text
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass  # it would be a client's words


class Server(http.server.ThreadingHTTPServer):
    server_bind = socketserver.TCPServer.server_bind  # http.server's asks the network for our name

    def __init__(self, host, port):
        self.host = host.lower()
        self.turn = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except OSError as e:
            raise ValueError(f"{host}, port {port}: {e.strerror}; give another --host, or --port 0 for a "
                             "free one") from None

    def run(self, talk, settings, page="serve.html"):
        """Answer until Ctrl-C. settings: what the page shows. talk: a function of what it asks that returns
        the pieces of an answer. ValueError: it is wrong."""
        text = Path(__file__).with_name(page).read_text()
        self.page = text.replace("SETTINGS", html.escape(json.dumps(settings)))
        self.talk = talk
        say(f"open http://{self.host}:{self.server_address[1]}/ in a browser; Ctrl-C ends")
        with contextlib.suppress(KeyboardInterrupt):
            self.serve_forever()
        self.server_close()
