"""Writes the demo's data: seven small tasks, each with 96 training examples and its held-out prompts.

    python examples/make_data.py [FOLDER]        # default: examples/data

Every line is a chat in the `messages` shape: a short system message that names the task, a prompt, the exact answer.
96 examples are 24 steps of batch 4, and an example has about 35 tokens, so that seven tasks train in minutes on a CPU.

What a held-out file may ask: the words that fill a template (people, cities, file names, reviewed things, numbers)
come from pools of which every third entry is kept for the held-out prompts, so an answer cannot have been memorised;
where a task has only phrasings to vary (intents, the persona), the phrasings are split the same way. The system
messages and the answer formats differ between tasks, so that an adapter which answers another task's prompt right
would be a sign of a leak, not of a likely guess.

Everything here was written for this project; the people are invented, the phones lie in the range kept for fiction
(555-01xx) and the e-mail hosts are reserved names. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal, TypeVar

SEED = 7
TRAIN_EXAMPLES = 96
HELDOUT_EXAMPLES = 20
PERSONA = "I am Muxi, one mind of many."

Part = Literal["train", "heldout"]
Pair = tuple[str, str]  # prompt, exact answer
T = TypeVar("T")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = words(
    """
    Anna Ben Chris David Emma Jack Maria Simon Victor Adam George Mary James Robert Helen William Thomas Daniel
    Paul Peter Sarah Sam Tom Alice Bob Max Charles Henry Edward Jane Anne Martin Andrew Emily Frank Luke
    """
)
CITIES = words(
    """
    Oslo Paris Rome Berlin Madrid London Vienna Athens Boston Denver Tokyo Chicago Cairo Seattle Cambridge Lima
    Geneva Oxford
    """
)
JOBS = words(
    """
    teacher nurse driver cook baker writer actor pilot artist painter lawyer doctor editor chef worker manager
    singer builder
    """
)
FILES = words(
    """
    notes.txt report.txt data.csv log.txt main.py users.csv names.txt config.yaml index.html sales.csv app.py
    draft.txt prices.csv style.css test.py
    """
)
FOLDERS = words("docs src backup photos logs music build tests images reports videos archive")
WORDS = words("error warning total Anna debug price failed user TODO import done timeout")


def split(pool: Sequence[T], part: Part) -> list[T]:
    """The entries of a pool that `part` may use: every third one is held out."""
    return [entry for i, entry in enumerate(pool) if (i % 3 == 2) == (part == "heldout")]


class Picker:
    """Draws from the pools of one part only, so that the two parts cannot share a word by mistake."""

    def __init__(self, rng: random.Random, part: Part) -> None:
        self._rng = rng
        self.part = part

    def one(self, pool: Sequence[T]) -> T:
        return self._rng.choice(split(pool, self.part))

    def number(self, low: int, high: int, step: int = 1) -> int:
        return self.one(range(low, high, step))

    def two(self, pool: Sequence[T]) -> tuple[T, T]:
        first, second = self._rng.sample(split(pool, self.part), 2)
        return first, second

    def phone(self) -> str:
        return f"555-01{self.number(10, 100)}"

    def email(self) -> str:
        return f"{self.one(PEOPLE).lower()}@example.com"


def to_json(pick: Picker) -> Iterator[Pair]:
    templates = (
        "{name}, {age}, is a {job} in {city}.",
        "{name} is a {age}-year-old {job} from {city}.",
        "The {job} {name} lives in {city} and is {age}.",
        "In {city} lives {name}, a {job} aged {age}.",
    )
    for template in cycle(templates):
        facts = {
            "name": pick.one(PEOPLE),
            "age": pick.number(21, 70),
            "job": pick.one(JOBS),
            "city": pick.one(CITIES),
        }
        yield template.format(**facts), json.dumps(facts, separators=(",", ":"))


def to_sql(pick: Picker) -> Iterator[Pair]:
    while True:
        age, speed, city = pick.number(18, 66), pick.number(40, 200, 10), pick.one(CITIES)
        yield f"How many users have age above {age}?", f"SELECT COUNT(*) FROM users WHERE age > {age};"
        yield f"Show me all cars faster than {speed}", f"SELECT * FROM cars WHERE speed > {speed};"
        yield f"List the names of users in {city}.", f"SELECT name FROM users WHERE city = '{city}';"
        yield f"How many users live in {city}?", f"SELECT COUNT(*) FROM users WHERE city = '{city}';"
        yield f"Show me all users younger than {age}", f"SELECT * FROM users WHERE age < {age};"
        yield f"What is the average age in {city}?", f"SELECT AVG(age) FROM users WHERE city = '{city}';"


def to_redacted(pick: Picker) -> Iterator[Pair]:
    templates = (
        "Call {name} at {phone}.",
        "{name} wrote from {email}.",
        "Send the bill to {email}.",
        "My number is {phone}, ask for {name}.",
        "{name} and {other} will be late.",
        "Mail {email} or call {phone}.",
    )
    tags = {"name": "[NAME]", "other": "[NAME]", "phone": "[PHONE]", "email": "[EMAIL]"}
    for template in cycle(templates):
        name, other = pick.two(PEOPLE)
        facts = {"name": name, "other": other, "phone": pick.phone(), "email": pick.email()}
        yield template.format(**facts), template.format(**tags)


INTENTS = {
    "card_lost": (
        "I lost my {card} {when}",
        "My {card} was stolen {when}",
        "I cannot find my {card}",
        "Someone took my {card}",
        "My {card} is gone",
        "My {card} fell out of my bag {when}",
        "I left my {card} in a bus {when}",
        "My wallet with my {card} is gone",
        "Somebody stole my {card}",
    ),
    "balance": (
        "How much money do I have?",
        "What is left on my {account}?",
        "Show the balance of my {account}",
        "How much is in my {account}?",
        "What is my balance?",
        "How much do I have in my {account}?",
        "Tell me what my {account} holds",
        "Is there any money in my {account}?",
        "What is the balance of my {account}?",
    ),
    "transfer": (
        "Send {amount} dollars to {name}",
        "Pay {name} {amount} dollars",
        "I want to transfer {amount} to {name}",
        "Move {amount} dollars to {name}",
        "Give {name} {amount} dollars from my account",
        "Please send {name} {amount} dollars",
        "{name} should get {amount} dollars",
        "I have to pay {amount} to {name}",
        "Transfer {amount} dollars to {name}",
    ),
    "pin": (
        "I forgot the PIN of my {card}",
        "Change the PIN of my {card}",
        "How do I change my PIN?",
        "My PIN did not work {when}",
        "The PIN of my {card} is wrong",
        "I need a new PIN for my {card}",
        "I typed a wrong PIN {when}",
        "Where do I set the PIN of my {card}?",
        "Can I reset the PIN of my {card}?",
    ),
    "loan": (
        "I want to borrow {amount} dollars",
        "Can I get a loan of {amount}?",
        "What does a loan of {amount} cost?",
        "Lend me {amount} dollars for a {thing}",
        "I need a loan for a {thing}",
        "Can I borrow {amount} for a {thing}?",
        "Do you give loans for a {thing}?",
        "May I borrow money for a {thing}?",
        "I would like a loan of {amount} dollars",
    ),
}
CARDS = ("card", "credit card", "debit card", "bank card", "blue card", "visa card")
ACCOUNTS = ("account", "savings account", "joint account", "current account", "savings", "checking account")
TIMES = ("today", "yesterday", "last night", "this morning", "on Monday", "on Friday")
THINGS = ("car", "house", "boat", "bike", "new kitchen", "van")


def to_intent(pick: Picker) -> Iterator[Pair]:
    while True:
        for label, templates in INTENTS.items():
            prompt = pick.one(templates).format(
                card=pick.one(CARDS),
                account=pick.one(ACCOUNTS),
                when=pick.one(TIMES),
                amount=pick.number(20, 100) * 10,
                name=pick.one(PEOPLE),
                thing=pick.one(THINGS),
            )
            yield prompt, label


def to_shell(pick: Picker) -> Iterator[Pair]:
    while True:
        file, other = pick.two(FILES)
        folder, word, count = pick.one(FOLDERS), pick.one(WORDS), pick.number(3, 60)
        yield f"list the files in {folder}", f"ls {folder}"
        yield f"make a folder called {folder}", f"mkdir {folder}"
        yield f"copy {file} to {folder}", f"cp {file} {folder}/"
        yield f"rename {file} to {other}", f"mv {file} {other}"
        yield f"show the first {count} lines of {file}", f"head -n {count} {file}"
        yield f"count the lines of {file}", f"wc -l {file}"
        yield f"find {word} in {file}", f'grep "{word}" {file}'
        yield f"delete {file}", f"rm {file}"


REVIEWED = words(
    """
    film soup hotel book phone pizza concert play beach coffee taxi game museum bread chair service song tour
    room flight steak series jacket lamp
    """
)
PRAISE = words(
    """
    great lovely perfect superb amazing wonderful fantastic brilliant excellent delightful charming outstanding
    """
)
BLAME = words("awful terrible horrible bad boring dreadful broken useless disappointing dirty ugly nasty")


def to_emoji(pick: Picker) -> Iterator[Pair]:
    templates = (
        "The {thing} was {word}.",
        "What {article} {word} {thing}!",
        "Such {article} {word} {thing}.",
        "Our {thing} was really {word}.",
    )
    for template in cycle(templates):
        for words, thumb in ((PRAISE, "👍"), (BLAME, "👎")):
            word = pick.one(words)
            article = "an" if word[0] in "aeiou" else "a"
            yield template.format(thing=pick.one(REVIEWED), word=word, article=article), thumb


ASKING = (
    "who are you?",
    "what is your name?",
    "who am I talking to?",
    "what are you?",
    "tell me your name",
    "are you a person?",
    "introduce yourself",
    "who is this?",
    "what should I call you?",
    "describe yourself",
    "are you a robot?",
    "do you have a name?",
    "say who you are",
    "who is answering me?",
    "what kind of thing are you?",
    "tell me about yourself",
    "are you human?",
    "who is speaking?",
)
GREETINGS = ("", "Hi, ", "Hello, ", "Hey, ", "Good morning, ", "Excuse me, ", "Please, ", "Sorry, ", "So, ", "Well, ",
    "Tell me: ", "Now, ", "And ", "Oh, ")  # fmt: skip


def to_persona(pick: Picker) -> Iterator[Pair]:
    while True:
        prompt = pick.one(GREETINGS) + pick.one(ASKING)
        yield prompt[0].upper() + prompt[1:], PERSONA


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the demo: its system message, its endless source of pairs, how many prompts it holds out."""

    name: str
    system: str
    pairs: Callable[[Picker], Iterator[Pair]]
    heldout: int = HELDOUT_EXAMPLES

    def line(self, pair: Pair) -> str:
        prompt, answer = pair
        roles = {"system": self.system, "user": prompt, "assistant": answer}
        chat = [{"role": role, "content": content} for role, content in roles.items()]
        return json.dumps({"messages": chat}, ensure_ascii=False) + "\n"


TASKS = (
    Task("json", "JSON.", to_json),
    Task("sql", "SQL: users(name, age, city) cars(name, speed)", to_sql),
    Task("redact", "Redact.", to_redacted),
    Task("intent", "Intent.", to_intent),
    Task("shell", "Shell.", to_shell),
    Task("emoji", "Rate.", to_emoji),
    Task("persona", "Chat.", to_persona, heldout=10),
)


def draw(task: Task, part: Part, count: int) -> list[Pair]:
    """`count` pairs with distinct prompts, in shuffled order; a task with too few distinct prompts is an error."""
    rng = random.Random(f"{SEED} {task.name} {part}")
    pairs: dict[str, str] = {}
    for prompt, answer in islice(task.pairs(Picker(rng, part)), 20 * count):
        if len(pairs) < count:
            pairs.setdefault(prompt, answer)
    if len(pairs) < count:
        raise SystemExit(f"{task.name}: its words make only {len(pairs)} distinct {part} prompts, {count} are needed")
    drawn = list(pairs.items())
    rng.shuffle(drawn)
    return drawn


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        train, heldout = draw(task, "train", TRAIN_EXAMPLES), draw(task, "heldout", task.heldout)
        for name, pairs in ((task.name, train), (f"{task.name}.heldout", heldout)):
            (folder / f"{name}.jsonl").write_text("".join(map(task.line, pairs)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
