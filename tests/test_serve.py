"""sample.py --serve: the page's questions and answers, who is refused and told why, and hostile clients."""
import contextlib
import dataclasses
import functools
import http.client
import json
import re
import threading

import pytest
import torch

import pipeline
import sample
import train
from config import Config
from corpus import chat, tokenizer
from interface import serve
from parallel import make_mesh
from runtime.launch import World

ASKS = {"mode": "text", "messages": ["a"], "temperature": 0.5}
SETTINGS = {"name": "out/<b>'s", "mode": "chat", "temperature": 0.8}
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e</script>&amp;"


@contextlib.contextmanager
def serving(talk, settings=SETTINGS, host="127.0.0.1"):
    """Yield a Server that answers with talk(asked), in a thread."""
    server = serve.Server(host, 0)
    server.serve_forever = functools.partial(server.serve_forever, 0.01)
    thread = threading.Thread(target=server.run, args=(talk, settings))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()


def ask(server, content=None, method="POST", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    body = None if content is None else json.dumps(content)
    connection.request(method, "/", body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    with contextlib.closing(connection):
        return response.status, response.read().decode()


class Slow:
    def __init__(self):
        self.may_end = threading.Event()

    def __call__(self, asked):
        yield "one"
        self.may_end.wait(30)
        yield " two"
        yield " three"


@pytest.fixture(scope="module")
def echo():
    def talk(asked):
        if asked["messages"] == ["no"]:
            raise ValueError("I cannot\nsay this")
        return iter(asked["messages"])
    with serving(talk) as server:
        yield server


def test_the_page_holds_its_settings_as_text_and_a_fresh_nonce(echo):
    status, page = ask(echo, method="GET")
    assert status == 200 and not re.search(r"https?://|innerHTML|insertAdjacent|document\.write|eval\(", page)
    assert "out/&lt;b&gt;&#x27;s" in page and "NONCE" not in page
    nonce, = re.findall(r"script-src 'nonce-(\w{64})'", page)
    assert page.count("<script") == page.count(f'<script nonce="{nonce}">') == 1
    assert nonce not in ask(echo, method="GET")[1]


def test_an_answer_is_plain_text(echo):
    connection = http.client.HTTPConnection(*echo.server_address[:2], timeout=30)
    connection.request("POST", "/", json.dumps({**ASKS, "messages": [HOSTILE, "\u00e9\n"]}))
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.read().decode() == HOSTILE + "\u00e9\n"
    connection.close()


@pytest.mark.parametrize("host,origin,status", [
    ("evil.example", "http://evil.example", 403),  # DNS rebinding
    ("127.0.0.1.evil.example", None, 403), ("localhost", "http://evil.example", 403),
    ("localhost:9000", "http://localhost:9000", 200)])  # ssh -L 9000:127.0.0.1:8000
def test_pages_of_others_are_refused(host, origin, status, echo):
    headers = {"Host": host, "Origin": origin} if origin else {"Host": host}
    for method, content in (("POST", ASKS), ("GET", None)):
        found, text = ask(echo, content, method, **headers)
        assert found == status and text.startswith("refused") == (status == 403), (method, text)


def test_what_cannot_be_answered_is_told_in_one_line(echo):
    assert ask(echo, {**ASKS, "messages": ["no"]}) == (400, "I cannot say this\n")
    assert ask(echo, ASKS) == (200, "a")
    with pytest.raises(ValueError, match=r"port \d+: Address already in use; give another --host, or"):
        serve.Server(*echo.server_address)


def test_one_answer_at_a_time():
    talk = Slow()
    with serving(talk) as server:
        first = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        first.request("POST", "/", json.dumps(ASKS))
        answer = first.getresponse()
        assert answer.read(3) == b"one"  # it comes piece by piece
        assert server.turn.locked() and ask(server, method="GET")[0] == 200
        second = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        second.request("POST", "/", json.dumps(ASKS))
        talk.may_end.set()
        assert answer.read() == b" two three" and second.getresponse().read() == b"one two three"
        first.close(), second.close()


# -----------------------------------------------------------------------------
# What sample.py answers

def small_model(vocabulary):
    cfg = Config(n_layer=1, n_embd=16, n_head=2, n_kv_head=1, ffn_hidden=24, seq_len=64, micro_batch=1)
    model, _, _ = train.build(cfg, make_mesh(World()), vocabulary.n_vocab, torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # otherwise every token is as likely as any other
    return model


@pytest.fixture(scope="module")
def talks():
    """Return what sample.reply takes: a small model, a vocabulary with the tokens of conversations, flags."""
    vocabulary = tokenizer.train_char(["abc \u00e9?"]).with_special(chat.MARKERS)
    flags = sample.Flags("run", serve=True, max_new_tokens=8)
    return dict(model=small_model(vocabulary), vocabulary=vocabulary, flags=flags)


def answers(asked, talks):
    return "".join(sample.reply({**ASKS, **asked}, **talks, seed=5))


def test_the_model_reads_the_whole_conversation_that_a_page_sends(talks, monkeypatch):
    talks = {**talks, "flags": dataclasses.replace(talks["flags"], system="abc")}
    asked = {"mode": "chat", "messages": ["a?"], "temperature": 0.8}
    flags = sample.Flags("run", max_new_tokens=8, seed=5, system="abc")
    first = sample.answer(talks["model"], talks["vocabulary"], flags, ["a?"])
    assert answers(asked, talks) == "".join(first) != ""
    seen = []

    def stream(model, tokens, most, **how):
        seen.append((tokens, most, how))
        return iter(())
    monkeypatch.setattr("pipeline.stream", stream)
    answers({**asked, "messages": ["a", "b", "c"], "temperature": 0}, talks)
    roles = zip(("system", "user", "assistant", "user"), ("abc", "a", "b", "c"), strict=True)
    ids, _ = chat.Template(talks["vocabulary"]).conversation([{"role": r, "content": c} for r, c in roles])
    (tokens, most, how), = seen
    assert tokens == [*ids, talks["vocabulary"].special["<|assistant|>"]] and most == 8
    assert how["temperature"] == 0 and how["top_k"] == 50 and how["rng"].initial_seed() == 5


def test_a_text_is_continued_as_by_a_prompt(talks):
    found = answers({"messages": ["abc"], "temperature": 0.8}, talks)
    ids = talks["vocabulary"].encode("abc")
    assert found == talks["vocabulary"].decode(pipeline.generate(talks["model"], ids, 8, 0.8, 50, 5)[3:])


@pytest.mark.parametrize("asked,words", [
    ({"messages": [""]}, "empty"), ({"messages": []}, "got 0"),
    ({"mode": "chat", "messages": ["a", "z", "a"]}, "z")])
def test_what_the_vocabulary_cannot_say_is_refused(asked, words, talks):
    with pytest.raises(ValueError, match=words):
        answers(asked, talks)


@pytest.mark.long
def test_the_page_in_a_browser(view):
    asked = []
    slow = Slow()

    def talk(given):
        asked.append(given)
        return slow(given) if given["messages"][-1] == "wait" else iter([HOSTILE, " ok"])
    with serving(talk) as server:
        view.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        view.fill("#text", "a <b>question</b>")
        view.press("#text", "Enter")
        view.wait_for_selector(".model:has-text('amp; ok')")
        assert view.inner_text(".model") == HOSTILE + " ok" and view.locator("#log img, #log b").count() == 0
        view.fill("#temperature", "0.2")
        view.fill("#text", "wait")
        view.click("#send")
        view.wait_for_selector(".model:text-is('one')")
        view.click("#stop")
        slow.may_end.set()
        view.wait_for_selector("#send:enabled")
    assert asked[1]["messages"] == ["a <b>question</b>", HOSTILE + " ok", "wait"]
    assert asked[1]["temperature"] == 0.2
