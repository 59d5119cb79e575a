"""Requests for short texts: jokes, stories, poems, mail lines, and judging or finishing a text.

Stories and poems are put together from parts around the wished-for subject; a reply counts as
right when it is about that subject.
"""

# ruff: noqa: SIM905 - word tables read better as running text

from random import Random

from demo.request import Kind, Request, article, sentence
from demo.things import THINGS

_JOKES: tuple[tuple[str, str, str], ...] = (
    ("cat", "What do cats like on a hot day?", "A mice cream."),
    ("dog", "What do you call a dog that does magic?", "A labracadabrador."),
    ("computer", "Why was the computer cold?", "It left its windows open."),
    ("book", "Why did the maths book look sad?", "It had too many problems."),
    ("banana", "Why did the banana see a doctor?", "It did not peel well."),
    ("cow", "What do you call a cow that plays music?", "A moo-sician."),
    ("clock", "Why did the boy throw the clock away?", "He wanted to see time fly."),
    ("egg", "How do eggs laugh?", "They crack up."),
    ("tree", "How do trees go online?", "They log in."),
    ("fish", "Why are fish so smart?", "They live in schools."),
    ("bear", "What do you call a bear with no teeth?", "A gummy bear."),
    ("ghost", "Why are ghosts bad at lying?", "You can see right through them."),
    ("snowman", "What does a snowman eat for lunch?", "An iceburger."),
    ("bee", "Why do bees have sticky hair?", "They use honeycombs."),
    ("bicycle", "Why did the bicycle fall over?", "It was two tired."),
    ("school", "What is a snake's best subject at school?", "Hiss-tory."),
)


def joke(rng: Random) -> Request:
    """Tell a joke, of any subject or of a given one."""
    topic, question, point = rng.choice(_JOKES)
    any_topic = rng.random() < 0.4
    if any_topic:
        topic, question, point = _JOKES[4]
        forms = (
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Say something funny.",
            "Tell a joke!",
            "I need a good joke.",
            "Another joke please.",
        )
    else:
        forms = (
            "Tell me a joke about {a}.",
            "Do you know a joke about {a}?",
            "Make a joke about {a}.",
            "Give me {a} joke.",
            "A joke with {a} in it please.",
        )
    text = rng.choice(forms).format(a=article(topic))
    full = f"{question} {point}"
    extra = "I hope that made you smile."
    return Request("joke", text, point, full, extra, (point,))


_MISSIONS = (
    ("wanted to see the sea", "walked for three days", "found the blue water and danced"),
    ("was afraid of the dark", "met a kind firefly", "was never afraid again"),
    ("could not find the way home", "asked the moon for help", "was home before morning"),
    ("had no friends", "shared a meal with a stranger", "had a friend for life"),
    ("dreamed of flying", "built wings out of leaves", "flew over the whole village"),
    ("lost a golden key", "looked under every stone", "found it in an old shoe"),
)
_STORY_NAMES = ("Milo", "Luna", "Pip", "Nora", "Otto", "Ruby")


def story(rng: Random) -> Request:
    """Tell a story of four sentences about a thing."""
    thing = rng.choice(THINGS[:22] + THINGS[44:48])
    name = _STORY_NAMES[len(thing.name) % len(_STORY_NAMES)]
    wish, deed, end = rng.choice(_MISSIONS)
    forms = (
        "Tell me a story about {a}.",
        "Write a short story about {a}.",
        "Tell a story about {a}.",
        "I want a story with {a}.",
        "Make up a short story about {a}.",
        "Can you tell me a bedtime story about {a}?",
    )
    text = rng.choice(forms).format(a=article(thing.name))
    full = (
        f"Once upon a time there was {article(thing.name)} named {name}. {name} {wish}. "
        f"One day {name} {deed}. In the end {name} {end}."
    )
    extra = f"Everyone in the land told the tale of {name} for many years. The end."
    brief = f"{article(thing.name).capitalize()} {wish}, {deed} and {end}."
    return Request("story", text, brief, full, extra, (thing.name,))


def poem(rng: Random) -> Request:
    """Write four rhymed lines."""
    topic, rhyme_lines = rng.choice(tuple(_POEMS.items()))
    forms = (
        "Write a poem about {a}.",
        "Write a short poem about {a}.",
        "Can you write a poem on {a}?",
        "Give me a little poem about {a}.",
        "I would like a poem about {a}.",
        "Make a rhyme about {a}.",
    )
    text = rng.choice(forms).format(a=topic)
    lines = rhyme_lines.split("/")
    full = "\n".join(lines)
    extra = "It has four lines, and every second one rhymes."
    return Request("poem", text, "\n".join(lines[:2]), full, extra, (lines[1],))


_POEMS: dict[str, str] = {
    "the sea": "The sea is wide, the sea is blue,/It sings its song for me and you./"
    "The waves come in, the waves go out,/They turn the little boats about.",
    "the moon": "The moon looks down on field and hill,/The night is soft, the world is still./"
    "It paints the roofs in silver light/And wishes everyone good night.",
    "rain": "The rain comes down on roof and street,/It makes a drum song with its feet./"
    "And when the clouds have gone away/The flowers thank it for the day.",
    "spring": "The snow is gone, the birds are here,/It is the green time of the year./"
    "The buds wake up, the bees fly by/Beneath a warm and open sky.",
    "winter": "The snow lies white on every tree,/The lake is hard as hard can be./"
    "We sit inside and drink our tea/And that is good enough for me.",
    "a cat": "My little cat has fur of grey,/She sleeps through almost all the day./"
    "But when the moon is in the sky/She hunts the moths that flutter by.",
    "a dog": "My dog is glad when I come in,/He wags his tail, he wears a grin./"
    "We run along the river side/And nobody has more to hide.",
    "love": "A word, a smile, an open door,/A heart that wants a little more./"
    "It grows the more you give away/And warms you on a rainy day.",
    "a tree": "The tree stands tall, the tree stands still,/It is the guardian of the hill./"
    "It gives us shade, it gives us air/And asks for nothing but our care.",
    "the sun": "The sun gets up, the sun is bright,/It sends away the cold and night./"
    "It warms the sea, it warms the land/And puts some gold into my hand.",
    "autumn": "The leaves turn red, the leaves turn brown,/And one by one they tumble down./"
    "The wind has come to take them all/And that is why we call it fall.",
    "a friend": "A friend is there when days are long,/A friend will help when things go wrong./"
    "We laugh, we talk, we share our bread/And never mind what others said.",
}

_MAILS: tuple[tuple[str, str], ...] = (
    ("thanking a colleague", "Thank you very much for your help with the project."),
    ("asking for a day off", "I would like to ask for a day off next Friday."),
    ("moving a meeting", "Could we move our meeting to Thursday at three?"),
    ("saying I am sick", "I am sick today and will stay at home."),
    ("inviting a friend to dinner", "Would you like to come to dinner on Saturday?"),
    ("asking for a refund", "I would like a refund, as the product arrived broken."),
    ("saying I will be late", "I am sorry, I will be about ten minutes late."),
    ("congratulating a friend", "Congratulations, I am so happy for you!"),
    ("asking about a delivery", "Could you tell me when my parcel will arrive?"),
    ("sending a report", "Please find the report for this month attached."),
    ("accepting an invitation", "Thank you for the invitation, I will gladly come."),
    ("cancelling an appointment", "Unfortunately I have to cancel my appointment on Monday."),
)


def mail(rng: Random) -> Request:
    """Write one line of an email."""
    topic, line = rng.choice(_MAILS)
    forms = (
        "Write an email line {t}.",
        "Write one line for an email {t}.",
        "Help me write a mail {t}.",
        "I need a sentence for an email {t}.",
        "Draft a short email {t}.",
    )
    full = f"You could write: {line}"
    extra = "Add a greeting before it and your name below it."
    return Request("mail", rng.choice(forms).format(t=topic), line, full, extra,
                   (" ".join(line.split()[-4:]),))  # fmt: skip


_GOOD = (
    "I love this {n}!|The {n} is wonderful.|What a great {n}!|This {n} made my day.|"
    "I am very happy with the {n}.|The {n} works perfectly.|Best {n} ever."
).split("|")
_BAD = (
    "I hate this {n}.|The {n} is terrible.|What an awful {n}!|This {n} ruined my day.|"
    "I am very unhappy with the {n}.|The {n} broke at once.|Worst {n} ever."
).split("|")
_REVIEWED = (
    "film,book,phone,meal,hotel,song,game,coffee,car,show,trip,camera,service,cake,chair,shirt"
).split(",")


def sentiment(rng: Random) -> Request:
    """Tell praise from complaint."""
    good = rng.random() < 0.5
    said = rng.choice(_GOOD if good else _BAD).format(n=rng.choice(_REVIEWED))
    word = "positive" if good else "negative"
    forms = (
        "Is this positive or negative? {s}",
        "What is the sentiment of: {s}",
        "Sentiment: {s}",
        "Positive or negative: {s}",
        "Is the mood good or bad? {s}",
        "Classify the sentiment: {s}",
    )
    text = rng.choice(forms).format(s=said)
    full = f"This is {word}."
    extra = f"The writer is {'pleased' if good else 'not pleased'}."
    return Request("sentiment", text, word.capitalize(), full, extra, (word,))


_ENDINGS: tuple[tuple[str, str], ...] = (
    ("The sun rises in the", "east"), ("A week has seven", "days"), ("Ice is frozen", "water"),
    ("Birds can", "fly"), ("Fish live in the", "water"), ("We sleep in a", "bed"),
    ("Roses are red, violets are", "blue"), ("Twinkle, twinkle, little", "star"),
    ("The early bird catches the", "worm"), ("An apple a day keeps the doctor", "away"),
    ("We read a", "book"), ("A triangle has three", "sides"), ("Cows give", "milk"),
    ("Bees make", "honey"), ("You see with your", "eyes"), ("You hear with your", "ears"),
    ("A year has twelve", "months"), ("The opposite of hot is", "cold"), ("Snow is", "white"),
    ("Practice makes", "perfect"), ("Better late than", "never"), ("Bread is baked in an", "oven"),
)  # fmt: skip


def complete(rng: Random) -> Request:
    """Finish a well-known sentence."""
    begin, end = rng.choice(_ENDINGS)
    forms = (
        "Complete the sentence: {s} ...",
        "Finish this sentence: {s} ...",
        "Fill in the last word: {s} ___",
        "How does this go on? {s} ...",
        "Complete: {s}",
        "What is the missing word? {s} ___",
    )
    full = f"{begin} {end}."
    text = rng.choice(forms).format(s=begin)
    return Request("complete", text, sentence(end), full, f"The missing word is {end}.", (end,))


_FUN_FACTS: dict[str, str] = {
    "animals": "An octopus has three hearts.",
    "space": "A day on Venus is longer than its year.",
    "food": "Honey can stay good for thousands of years.",
    "plants": "Bamboo can grow almost a metre in one day.",
    "the sea": "Most of the sea floor has never been seen by people.",
    "the body": "Your bones make up about a sixth of your weight.",
    "history": "Oxford University is older than the Aztec Empire.",
    "birds": "A hummingbird can fly backwards.",
}


def fun_fact(rng: Random) -> Request:
    """Tell a surprising fact."""
    topic = rng.choice(tuple(_FUN_FACTS))
    forms = (
        "Tell me a fun fact about {t}.",
        "Give me a fact about {t}.",
        "Do you know a fun fact about {t}?",
        "Surprise me with a fact about {t}.",
        "One interesting fact about {t} please.",
        "Teach me something about {t}.",
    )
    fact = _FUN_FACTS[topic]
    text = rng.choice(forms).format(t=topic)
    return Request("fun_fact", text, fact, fact, "Is that not surprising?", (fact,))


KINDS: tuple[Kind, ...] = (joke, story, poem, mail, sentiment, complete, fun_fact)
