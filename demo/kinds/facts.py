"""Requests about the small world of `demo.things`: what things are, how they relate, what follows.

Answers come from the shared tables, so the same thing is always told the same way.
"""

from random import Random

from demo.request import Kind, Request, article, sentence
from demo.things import (
    CAPITALS,
    COLOURS_OF,
    DAYS,
    GROUPS,
    HOMES,
    MONTHS,
    OPPOSITES,
    PASTS,
    PLURALS,
    PURPOSES,
    RHYMES,
    SIZES,
    SOUNDS,
    THINGS,
    TRANSLATIONS,
    Thing,
)


def _titled(thing: Thing) -> str:
    return sentence(article(thing.name)).rstrip(".")


def define(rng: Random) -> Request:
    """Say what a word means."""
    thing = rng.choice(THINGS)
    forms = (
        "What is {a}?",
        "Define {n}.",
        "What does the word {n} mean?",
        "Give me a definition of {n}.",
        "What's {a}?",
        "Tell me what {a} is.",
    )
    text = rng.choice(forms).format(a=article(thing.name), n=thing.name)
    full = f"{_titled(thing)} is {thing.meaning}."
    brief = sentence(thing.meaning)
    return Request("define", text, brief, full, " ".join(thing.details), (thing.meaning,))


def describe(rng: Random) -> Request:
    """Say what a thing is like."""
    thing = rng.choice(THINGS)
    forms = (
        "Describe {a}.",
        "Can you describe {a}?",
        "Tell me about {a}.",
        "Give me a description of {a}.",
        "What is {a} like?",
        "Tell me something about the {n}.",
    )
    text = rng.choice(forms).format(a=article(thing.name), n=thing.name)
    full = f"{_titled(thing)} is {thing.meaning}. {thing.details[0]}"
    extra = f"{thing.details[1]} It is often {thing.colour}."
    return Request("describe", text, sentence(thing.meaning), full, extra, (thing.details[0],))


def categorise(rng: Random) -> Request:
    """Name the group a thing belongs to."""
    thing = rng.choice(THINGS)
    forms = (
        "What kind of thing is {a}?",
        "Which category does {a} belong to?",
        "Categorise this: {n}",
        "Is {a} an animal, a plant or a thing people make? Name its group.",
        "Put {n} in a category.",
    )
    text = rng.choice(forms).format(a=article(thing.name), n=thing.name)
    full = f"{_titled(thing)} is {article(thing.group)}."
    return Request("categorise", text, thing.group.capitalize(), full, thing.details[0],
                   (thing.group,))  # fmt: skip


def yes_no(rng: Random) -> Request:
    """Say whether a thing belongs to a group."""
    thing = rng.choice(THINGS)
    other = rng.choice(THINGS)
    group = thing.group if rng.random() < 0.5 else other.group
    right = group == thing.group
    forms = (
        "Is {a} {g}?",
        "Would you say {a} is {g}?",
        "Yes or no: is {a} {g}?",
        "Is it true that {a} is {g}?",
    )
    text = rng.choice(forms).format(a=article(thing.name), g=article(group))
    yes = f"Yes, {article(thing.name)} is {article(group)}."
    no = f"No, {article(thing.name)} is not {article(group)}."
    extra = f"It is {thing.meaning}."
    brief = "Yes." if right else "No."
    return Request("yes_no", text, brief, yes if right else no, extra, (brief[:-1],))


def true_false(rng: Random) -> Request:
    """Judge a statement about a thing."""
    thing, other = rng.choice(THINGS), rng.choice(THINGS)
    meaning = thing.meaning if rng.random() < 0.5 else other.meaning
    right = meaning == thing.meaning
    said = f"{article(thing.name)} is {meaning}."
    forms = (
        "True or false: {s}",
        "True or false? {s}",
        "Is this true or false: {s}",
        "Say true or false. {s}",
    )
    full = "True." if right else f"False. {_titled(thing)} is {thing.meaning}."
    brief = "True." if right else "False."
    text = rng.choice(forms).format(s=said)
    return Request("true_false", text, brief, full, thing.details[0], (brief[:-1],))


def colour(rng: Random) -> Request:
    """Name the colour of a thing."""
    thing = rng.choice(tuple(COLOURS_OF))
    word = rng.choice(("colour", "color"))
    forms = (
        "What {w} is {t}?",
        "Which {w} does {t} have?",
        "Tell me the {w} of {t}.",
        "What is the {w} of {t}?",
    )
    text = rng.choice(forms).format(w=word, t=thing)
    name = COLOURS_OF[thing]
    full = sentence(f"{thing} is {name}")
    return Request("colour", text, name.capitalize(), full, "That is how most people see it.",
                   (name,))  # fmt: skip


def capital(rng: Random) -> Request:
    """Name the capital of a country."""
    country = rng.choice(tuple(CAPITALS))
    city = CAPITALS[country]
    forms = (
        "What is the capital of {c}?",
        "Name the capital of {c}.",
        "Which city is the capital of {c}?",
        "Capital of {c}?",
        "Tell me the capital of {c}.",
        "What's the capital city of {c}?",
    )
    text = rng.choice(forms).format(c=country)
    full = f"The capital of {country} is {city}."
    extra = f"{city} is a large city with a long history."
    return Request("capital", text, city, full, extra, (city,))


def sound(rng: Random) -> Request:
    """Name the sound of an animal."""
    animal = rng.choice(tuple(SOUNDS))
    noise = SOUNDS[animal]
    forms = (
        "What sound does {a} make?",
        "What does {a} say?",
        "Which noise does {a} make?",
        "How does {a} sound?",
        "Make the sound of {a}.",
    )
    text = rng.choice(forms).format(a=article(animal))
    full = sentence(f"{article(animal)} says {noise}")
    return Request("sound", text, sentence(noise), full, "It can be quite loud.", (noise,))


def home(rng: Random) -> Request:
    """Say where an animal lives."""
    animal = rng.choice(tuple(HOMES))
    place = HOMES[animal]
    forms = (
        "Where does {a} live?",
        "What is the home of {a}?",
        "Where can I find {a}?",
        "Where do you find {a}?",
    )
    text = rng.choice(forms).format(a=article(animal))
    full = sentence(f"{article(animal)} lives in {place}")
    extra = "There it finds food and shelter."
    return Request("home", text, sentence(f"In {place}"), full, extra, (place,))


def purpose(rng: Random) -> Request:
    """Say what a thing is used for."""
    thing = rng.choice(tuple(PURPOSES))
    use = PURPOSES[thing]
    noun = thing if thing == "soap" else article(thing)
    forms = (
        "What is {a} used for?",
        "What do you use {a} for?",
        "What's {a} for?",
        "Why do people need {a}?",
    )
    full = sentence(f"{noun} is used for {use}")
    return Request("purpose", rng.choice(forms).format(a=noun), sentence(f"For {use}"), full,
                   "Most homes have one.", (use,))  # fmt: skip


def list_group(rng: Random) -> Request:
    """List some members of a group."""
    group = rng.choice(tuple(GROUPS))
    count = rng.choices((2, 3, 4, 5), weights=(2, 4, 2, 3))[0]
    word = ("two", "three", "four", "five")[count - 2]
    chosen = GROUPS[group][:count]
    forms = (
        "Name {k} {g}.",
        "List {k} {g}.",
        "Give me {k} {g}.",
        "Tell me {k} {g}.",
        "Can you name {k} {g}?",
        "I need {k} {g}.",
        "Write a list of {k} {g}.",
    )
    text = rng.choice(forms).format(k=rng.choice((word, str(count))), g=group)
    listed = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
    full = f"{sentence(word)[:-1]} {group} are {listed}."
    extra = f"There are many more {group} than these."
    return Request("list_group", text, sentence(listed), full, extra, (listed,))


def bigger(rng: Random) -> Request:
    """Pick the bigger or smaller of two things."""
    small, big = sorted(rng.sample(range(len(SIZES)), 2))
    names = ["the " + SIZES[i] for i in (small, big)]
    asks_big = rng.random() < 0.65
    result = names[1] if asks_big else names[0]
    word = "bigger" if asks_big else "smaller"
    a, b = rng.sample(names, 2)
    if rng.random() < 0.5:
        a, b = (article(n[4:]) if n not in ("the sun", "the moon") else n for n in (a, b))
    forms = (
        "Which is {w}, {a} or {b}?",
        "What is {w}: {a} or {b}?",
        "Is {a} or {b} {w}?",
        "{a} or {b}, which is {w}?",
    )
    text = rng.choice(forms).format(w=word, a=a, b=b)
    full = sentence(f"{result} is {word}")
    extra = f"From small to big it goes: {names[0][4:]}, {names[1][4:]}."
    return Request("bigger", text, sentence(result), full, extra, (full[:-1],))


def opposite(rng: Random) -> Request:
    """Name the opposite of a word."""
    pair = rng.choice(tuple(OPPOSITES.items()))
    word, other = pair if rng.random() < 0.6 else pair[::-1]
    forms = (
        "What is the opposite of {w}?",
        "Opposite of {w}?",
        "Give me the opposite of {w}.",
        "What's the opposite of the word {w}?",
        "Tell me a word that means the opposite of {w}.",
    )
    full = f"The opposite of {word} is {other}."
    extra = "Such pairs are called antonyms."
    text = rng.choice(forms).format(w=word)
    return Request("opposite", text, other.capitalize(), full, extra, (other,))


def plural(rng: Random) -> Request:
    """Name the plural of a noun."""
    word = rng.choice(tuple(PLURALS))
    forms = (
        "What is the plural of {w}?",
        "Plural of {w}?",
        "Give me the plural of {w}.",
        "One {w}, two what?",
        "How do you say more than one {w}?",
    )
    full = f"The plural of {word} is {PLURALS[word]}."
    text = rng.choice(forms).format(w=word)
    return Request("plural", text, PLURALS[word].capitalize(), full,
                   f"You say one {word}, two {PLURALS[word]}.", (PLURALS[word],))  # fmt: skip


def past(rng: Random) -> Request:
    """Name the past tense of a verb."""
    word = rng.choice(tuple(PASTS))
    forms = (
        "What is the past tense of {w}?",
        "Past tense of {w}?",
        "Give me the past form of {w}.",
        "Put {w} in the past tense.",
    )
    full = f"The past tense of {word} is {PASTS[word]}."
    extra = f"Today I {word}, yesterday I {PASTS[word]}."
    text = rng.choice(forms).format(w=word)
    return Request("past", text, PASTS[word].capitalize(), full, extra, (PASTS[word],))


def rhyme(rng: Random) -> Request:
    """Name a word that rhymes."""
    row = rng.choice(RHYMES)
    word = rng.choice(row)
    other = next(w for w in row if w != word)
    forms = (
        "What rhymes with {w}?",
        "Give me a rhyme for {w}.",
        "Tell me a word that rhymes with {w}.",
        "Find a rhyme for {w}.",
    )
    full = f"{other.capitalize()} rhymes with {word}."
    text = rng.choice(forms).format(w=word)
    extra = "They end with the same sound."
    return Request("rhyme", text, other.capitalize(), full, extra, (other,))


def translate(rng: Random) -> Request:
    """Translate one word."""
    language = rng.choice(tuple(TRANSLATIONS))
    word, foreign = rng.choice(tuple(TRANSLATIONS[language].items()))
    forms = (
        "Translate {w} to {l}.",
        "How do you say {w} in {l}?",
        "What is {w} in {l}?",
        "What is the {l} word for {w}?",
        "{w} in {l}?",
        "Translate the word {w} into {l}.",
    )
    full = f"{word.capitalize()} in {language} is {foreign}."
    text = rng.choice(forms).format(w=word, l=language)
    extra = f"Now you know one more word of {language}."
    return Request("translate", text, foreign.capitalize(), full, extra, (foreign,))


def next_in_calendar(rng: Random) -> Request:
    """Name the day or month before or after."""
    names, what = (DAYS, "day") if rng.random() < 0.55 else (MONTHS, "month")
    at = rng.randrange(len(names))
    after = rng.random() < 0.65
    word = "after" if after else "before"
    result = names[(at + (1 if after else -1)) % len(names)]
    forms = (
        "What {k} comes {w} {n}?",
        "Which {k} is {w} {n}?",
        "What comes {w} {n}?",
        "Tell me the {k} {w} {n}.",
    )
    text = rng.choice(forms).format(k=what, w=word, n=names[at])
    full = f"{result} comes {word} {names[at]}."
    extra = f"There are {len(names)} {'days in a week' if what == 'day' else 'months in a year'}."
    return Request("next_in_calendar", text, result, full, extra, (result,))


def list_calendar(rng: Random) -> Request:
    """List all days or months."""
    if rng.random() < 0.5:
        names, what = DAYS, "days of the week"
    else:
        names, what = MONTHS, "months of the year"
    forms = (
        "List the {k}.",
        "Name the {k}.",
        "What are the {k}?",
        "Tell me the {k} in order.",
        "Can you list all {k}?",
        "Write down the {k}.",
    )
    listed = ", ".join(names)
    text = rng.choice(forms).format(k=what)
    extra = f"That makes {len(names)} in all."
    return Request("list_calendar", text, f"{listed}.", f"The {what} are {listed}.", extra,
                   (listed,))  # fmt: skip


KINDS: tuple[Kind, ...] = (
    define, describe, categorise, yes_no, true_false, colour, capital, sound, home, purpose,
    list_group, bigger, opposite, plural, past, rhyme, translate, next_in_calendar, list_calendar,
)  # fmt: skip
