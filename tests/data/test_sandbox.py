"""The sandbox: a template can neither reach out, nor burn time, memory or disk, nor take this process with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import psutil
import pytest

from muxtune.data.sandbox import Ask, Conversation, Limits, Sandbox, TemplateFault
from muxtune.errors import DataError

NOW = datetime(2026, 3, 9, 14, 5)
CHAT = Conversation([{"role": "user", "content": "secret words"}])
SHORT = Limits(time_s=2.0)


@pytest.fixture
def opened() -> Iterator[list[Sandbox]]:
    sandboxes: list[Sandbox] = []
    yield sandboxes
    for sandbox in sandboxes:
        sandbox.close()


def render(opened: list[Sandbox], source: str, limits: Limits | None = None) -> str | TemplateFault:
    sandbox = Sandbox(source, name="probe.jinja", now=NOW, limits=limits or SHORT)
    opened.append(sandbox)
    return sandbox.render([CHAT], [Ask(0, 1)], {"eos_token": "</s>"}).texts[0]


ATTACKS = {
    "walks internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "walks from a global": "{{ cycler.__init__.__globals__ }}",
    "mutates its data": "{{ messages.append(1) }}",
    "private names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "loops without a word": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops into a variable": "{% set x %}{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxxxxxxxxxxxxxx"
    "{% endfor %}{% endfor %}{% endset %}",
    "a billion letters": "{{ 'a' * 10**9 }}",
    "a hundred million letters": "{{ 'a' * 10**8 }}",
    "a hundred million letters, later": "{{ messages[0].role[0] * 10**8 }}",
    "a wide number": "{{ '%0100000000d' % 1 }}",
    "a large power": "{{ (7 ** (7 ** 9)) % 10 }}",
    "endless recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep nesting": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "a file": "{% include '/etc/passwd' %}",
    "bad syntax": "{% if %}",
    "unknown filter": "{{ messages | random }}",
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_costs_little_and_is_refused_by_name(opened: list[Sandbox], source: str) -> None:
    before_bytes = psutil.Process().memory_info().rss
    start_s = time.monotonic()
    try:
        answer = render(opened, source)
    except DataError as error:
        assert "probe.jinja" in str(error)
    else:
        assert isinstance(answer, TemplateFault)
    assert time.monotonic() - start_s < 20  # two seconds' limit, a slow machine
    assert psutil.Process().memory_info().rss - before_bytes < 100 * 2**20
    assert render(opened, "{{ messages[0].role }}") == "user", "this process lives and renders"


@pytest.mark.parametrize("times, allowed", [(40, True), (400, False)])
def test_memory_is_bounded_by_the_limit(opened: list[Sandbox], times: int, allowed: bool) -> None:
    source = f"{{% set x = messages[0].role * ({times} * 2**18) %}}{{{{ x | length }}}}"  # of 4 letters: MiB
    limits = Limits(memory_bytes=256 * 2**20)
    if allowed:
        assert render(opened, source, limits) == str(times * 2**20)
    else:
        with pytest.raises(DataError, match="memory"):
            render(opened, source, limits)


@pytest.mark.parametrize("chars, allowed", [(1000, True), (1001, False)])
def test_output_is_bounded_by_the_limit(opened: list[Sandbox], chars: int, allowed: bool) -> None:
    source = f"{{% for i in range({chars}) %}}x{{% endfor %}}"
    limits = Limits(output_chars=1000)
    if allowed:
        assert render(opened, source, limits) == "x" * chars
    else:
        with pytest.raises(DataError, match="1,000 characters"):
            render(opened, source, limits)


def test_the_worker_is_gone_after_a_breach_and_the_sandbox_starts_another() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    sandbox = Sandbox(source + "{% endfor %}{% endif %}ok", name="t", now=NOW, limits=Limits(time_s=1.0))
    try:
        with pytest.raises(DataError, match="longer than 1 s"):
            sandbox.render([Conversation([{"role": "user", "content": "loop"}])], [Ask(0, 1)], {})
        assert sandbox._worker is None
        assert sandbox.render([CHAT], [Ask(0, 1)], {}).texts == ("ok",)
    finally:
        sandbox.close()


def test_one_worker_serves_many_and_ends_with_close() -> None:
    sandbox = Sandbox("{{ messages[0].content }}", name="t", now=NOW)
    pids = set()
    for text in ("a", "b", "c"):
        chat = Conversation([{"role": "user", "content": text}])
        assert sandbox.render([chat], [Ask(0, 1)], {}).texts == (text,)
        assert sandbox._worker is not None
        pids.add(sandbox._worker._process.pid)
    assert len(pids) == 1
    sandbox.close()
    assert not psutil.pid_exists(pids.pop())
    assert sandbox.render([CHAT], [Ask(0, 1)], {}).texts == ("secret words",), "closed is not dead"
    sandbox.close()


def test_a_worker_killed_from_outside_is_an_error_and_then_replaced() -> None:
    sandbox = Sandbox("ok", name="t", now=NOW)
    sandbox.render([CHAT], [Ask(0, 1)], {})
    assert sandbox._worker is not None
    os.kill(sandbox._worker._process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="crashed"):
        sandbox.render([CHAT], [Ask(0, 1)], {})
    assert sandbox.render([CHAT], [Ask(0, 1)], {}).texts == ("ok",)
    sandbox.close()


def test_an_idle_worker_ends_by_itself_and_is_replaced() -> None:
    sandbox = Sandbox("ok", name="t", now=NOW, limits=Limits(idle_s=0.5))
    sandbox.render([CHAT], [Ask(0, 1)], {})
    assert sandbox._worker is not None
    assert sandbox._worker._process.wait(timeout=10) == -signal.SIGALRM
    assert sandbox.render([CHAT], [Ask(0, 1)], {}).texts == ("ok",)
    sandbox.close()


def test_a_sandbox_that_is_dropped_leaves_no_process() -> None:
    sandbox = Sandbox("ok", name="t", now=NOW)
    sandbox.render([CHAT], [Ask(0, 1)], {})
    assert sandbox._worker is not None
    pid = sandbox._worker._process.pid
    del sandbox
    assert not psutil.pid_exists(pid)


def test_a_killed_parent_leaves_no_worker_even_in_an_endless_loop() -> None:
    script = """
import os, signal, threading, time
from datetime import datetime
from muxtune.data.sandbox import *
loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
sandbox = Sandbox(loop, name="t", now=datetime(2026, 1, 1), limits=Limits(time_s=3))
threading.Thread(target=lambda: sandbox.render([Conversation([])], [Ask(0, 0)], {}), daemon=True).start()
while sandbox._worker is None:
    time.sleep(0.01)
time.sleep(1)
print(sandbox._worker._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + 20
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline_s:
        if psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE:
            break  # ended; nobody in this container collects orphans
        time.sleep(0.1)
    else:
        assert time.monotonic() < deadline_s


def test_what_one_conversation_causes_concerns_it_alone(opened: list[Sandbox]) -> None:
    sandbox = Sandbox("{{ 'a' + messages[0].content }}", name="t", now=NOW)
    opened.append(sandbox)
    good, bad = Conversation([{"content": "b"}]), Conversation([{"content": None}])
    texts = sandbox.render([good, bad, good], [Ask(0, 1), Ask(1, 1), Ask(2, 1)], {}).texts
    assert texts[0] == texts[2] == "ab"
    assert isinstance(texts[1], TemplateFault)
    assert "line 1" in texts[1].message and "NoneType" in texts[1].message


@pytest.mark.parametrize(
    "source, shown",
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception(messages[0].content) }}", "TemplateError"),
        ("{{ {}[messages[0].content].x }}", "UndefinedError"),
        ("{{ messages[0].content.index('x') }}", "ValueError"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ 1 + messages[0].content }}", "'int' and 'str'"),
        ("{% macro f() %}{% endmacro %}{{ f(**{messages[0].content: 1}) }}", "TypeError"),
    ],
)
def test_a_message_quotes_the_template_and_never_the_data(opened: list[Sandbox], source: str, shown: str) -> None:
    answer = render(opened, source)
    assert isinstance(answer, TemplateFault)
    assert shown in answer.message
    assert "secret" not in answer.message


def test_the_clock_stands_still_and_chance_is_absent(opened: list[Sandbox]) -> None:
    assert render(opened, "{{ strftime_now('%d %b %Y %H:%M') }}") == "09 Mar 2026 14:05"
    answer = render(opened, "{{ lipsum() }}")
    assert isinstance(answer, TemplateFault)


def test_what_transformers_offers_is_there(opened: list[Sandbox]) -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for i in range(9) -%}{%- if i == 3 -%}{%- break -%}{%- endif -%}"
        "{%- set ns.n = ns.n + i -%}{%- endfor -%}{{ ns.n }} {{ dict(a=1) | tojson }} {{ {'k': 'é<'} | tojson }}"
        "{% generation %} {{ eos_token }}{% endgeneration %}"
    )
    sandbox = Sandbox(source, name="t", now=NOW)
    opened.append(sandbox)
    reply = sandbox.render([CHAT], [Ask(0, 1)], {"eos_token": "</s>"})
    assert reply.texts == ('3 {"a": 1} {"k": "é<"} </s>',)
    assert [str(reply.texts[0])[a:b] for a, b in reply.generation] == [" </s>"]


def test_renderings_share_nothing_but_their_text(opened: list[Sandbox]) -> None:
    """The wire carries only what differs from the first rendering; what arrives is the whole of each."""
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    sandbox = Sandbox(source, name="t", now=NOW)
    opened.append(sandbox)
    chat = Conversation([{"content": text} for text in ("a", "\N{SNOWMAN}\N{PILE OF POO}", "\x00\n")])
    other = Conversation([{"content": "ax"}])
    texts = sandbox.render([chat, other], [Ask(0, 3), Ask(0, 2, True), Ask(0, 0), Ask(1, 1)], {}).texts
    assert texts == ("[a][☃💩][\x00\n]", "[a][☃💩]>", "", "[ax]")


def _render_in_child(queue: multiprocessing.Queue[str]) -> None:
    import torch  # noqa: F401  (as in a training process)

    sandbox = Sandbox("{{ messages[0].role }}", name="t", now=NOW)
    queue.put(str(sandbox.render([CHAT], [Ask(0, 1)], {}).texts[0]))
    sandbox.close()


def test_it_works_in_a_spawned_process_that_has_torch_loaded() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_render_in_child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == "user"
    process.join(timeout=60)
    assert process.exitcode == 0
