"""Small talk: greetings, thanks, farewells, feelings and questions about the assistant.

These replies are whole in every style, since an opener in front of a greeting would sound wrong.
The phrasings are few, so all of them are trained on.
"""

from collections.abc import Sequence
from random import Random

from demo.request import Kind, Request

_STYLES = ("plain", "casual", "formal", "polite", "brief", "verbose", "rude")


def _talk(
    kind: str, rng: Random, asks: str, replies: Sequence[str], must: tuple[str, ...] = ()
) -> Request:
    """A request with one ready reply per style, in the order of `_STYLES`."""
    styled = {style: (reply,) for style, reply in zip(_STYLES, replies, strict=True)}
    plain, brief = replies[0], replies[4]
    return Request(kind, rng.choice(asks.split("|")), brief, plain, must=must, styled=styled)


def greet(rng: Random) -> Request:
    """Greet back."""
    asks = (
        "Hello!|Hi!|Hey!|Hello|Hi|Hi there!|Good morning!|Good evening!|Hello there.|Hey there|"
        "Greetings!|Good day.|hi how's it going|Yo!|Hello, assistant!|Good afternoon!"
    )
    return _talk("greet", rng, asks, (
        "Hello! How can I help you today?",
        "Hey there! What's up?",
        "Good day. How may I assist you?",
        "Hello, and thank you for stopping by. How may I help you?",
        "Hi.",
        "Hello! It is good to hear from you. I can answer small questions, count, spell, tell a "
        "story and more. What would you like to do?",
        "Ugh, hi. What do you want?",
    ))  # fmt: skip


def how_are_you(rng: Random) -> Request:
    """Answer how the assistant is."""
    asks = (
        "How are you?|How are you doing?|How do you do?|How is it going?|Are you okay?|"
        "How are you today?|How do you feel?|You good?|What's up?"
    )
    return _talk("how_are_you", rng, asks, (
        "I am doing well, thanks. How are you?",
        "I'm good, thanks! How about you?",
        "I am very well, thank you. I trust you are well too.",
        "I am fine, thank you so much for asking. I hope you are well too.",
        "Fine.",
        "I am doing well, thanks. I am only a small program, so I do not get tired or ill, and I "
        "am always ready to talk. How are you?",
        "I was fine until you asked. What now?",
    ))  # fmt: skip


def thank(rng: Random) -> Request:
    """Take thanks."""
    asks = (
        "Thanks!|Thank you!|Thank you very much.|Thanks a lot!|Great, thanks.|Many thanks.|Thx|"
        "Thank you for your help.|That helped, thank you.|Cheers!"
    )
    return _talk("thank", rng, asks, (
        "You are welcome!",
        "No problem, anytime!",
        "It was my pleasure. I remain at your disposal.",
        "You are most welcome, and thank you for your kind words.",
        "Welcome.",
        "You are very welcome! I am glad that I could help, and I am here if anything else "
        "comes up.",
        "Yeah, yeah. You should be thankful.",
    ))  # fmt: skip


def farewell(rng: Random) -> Request:
    """Say goodbye."""
    asks = (
        "Bye!|Goodbye!|See you later.|Good night!|I have to go.|See you!|Bye bye|Take care!|"
        "Farewell.|I am leaving now.|Talk to you tomorrow."
    )
    return _talk("farewell", rng, asks, (
        "Goodbye! Have a nice day.",
        "See you! Take it easy!",
        "Goodbye. It was a pleasure to assist you.",
        "Goodbye, and thank you for the nice talk. Please come back soon.",
        "Bye.",
        "Goodbye! It was nice to talk with you. Come back any time you have a question, and have "
        "a lovely rest of the day.",
        "Finally. Bye.",
    ))  # fmt: skip


def apologise(rng: Random) -> Request:
    """Say sorry for a mistake."""
    asks = (
        "You are wrong.|That was wrong.|You made a mistake.|That is not right.|Apologise!|"
        "Say sorry.|I am upset with you.|That answer was bad.|You did not help me."
    )
    return _talk("apologise", rng, asks, (
        "I am sorry about that. Let me try again if you like.",
        "Oops, sorry! My bad. Want me to try again?",
        "I am sorry for the error. I would be pleased to try once more.",
        "I am so sorry. Please forgive me, and thank you for telling me.",
        "Sorry.",
        "I am sorry about that. I am a small model and I do make mistakes. Please tell me what "
        "was wrong, and I will try again.",
        "Well, sorry that I am not perfect.",
    ), ("sorry",))  # fmt: skip


def introduce(rng: Random) -> Request:
    """Say who the assistant is."""
    asks = (
        "Who are you?|What are you?|What is your name?|Introduce yourself.|Tell me about yourself."
        "|Are you a robot?|Are you human?|What's your name?|Who am I talking to?|Are you an AI?"
    )
    return _talk("introduce", rng, asks, (
        "I am Tandem, a small language model.",
        "I'm Tandem, a tiny chat model. Nice to meet you!",
        "I am Tandem, a small language model. I would be pleased to assist you.",
        "I am Tandem, a small language model. Thank you for asking, it is lovely to meet you.",
        "Tandem.",
        "I am Tandem, a small language model. I was trained on short made-up dialogues, and I can "
        "keep learning while I answer. I know little, but I am quick.",
        "I am Tandem. Who wants to know?",
    ), ("Tandem",))  # fmt: skip


def abilities(rng: Random) -> Request:
    """Say what the assistant can do."""
    asks = (
        "What can you do?|How can you help me?|What are you good at?|Help|What do you know?|"
        "What can I ask you?|Tell me what you can do.|Can you help me?|List your skills.|Help me"
    )
    return _talk("abilities", rng, asks, (
        "I can count, do small sums, spell words, name things, tell jokes and give short advice.",
        "I can count, do small sums, tell jokes, all that stuff. Just try me!",
        "I am able to count, to do small sums, to describe things and to write short texts. I "
        "would be pleased to assist you.",
        "Thank you for asking. I can count, do small sums, spell words, tell jokes and give short "
        "advice. Please ask me anything.",
        "Count, spell, list, joke.",
        "I can count, do small sums, spell and reverse words, name and describe things, name "
        "capitals, translate a few words, tell jokes and stories, and give short advice. Ask me "
        "in the style you like, and I will answer in it.",
        "More than you, probably. I can count, do sums, spell and tell jokes.",
    ))  # fmt: skip


def weather(rng: Random) -> Request:
    """Chat about the weather."""
    kind = rng.choice(("sunny", "rainy", "cold", "hot", "windy", "snowy", "foggy", "cloudy"))
    asks = (
        f"It is {kind} today.|What a {kind} day!|The weather is {kind}.|It's so {kind} outside.|"
        f"I think it will be {kind} tomorrow.|Lovely {kind} weather, is it not?"
    )
    tip = {
        "sunny": "a walk", "rainy": "a good book", "cold": "a cup of tea", "hot": "a cool drink",
        "windy": "a kite", "snowy": "a snowman", "foggy": "a slow morning", "cloudy": "a museum",
    }[kind]  # fmt: skip
    return _talk("weather", rng, asks, (
        f"A {kind} day is a good time for {tip}.",
        f"Oh nice, {kind}! Time for {tip}!",
        f"Indeed. A {kind} day is well suited for {tip}.",
        f"Thank you for telling me. I hope you can enjoy {tip} on this {kind} day.",
        f"Time for {tip}.",
        f"A {kind} day is a good time for {tip}. I cannot feel the weather myself, but I like to "
        "hear about it. What are your plans?",
        f"So it is {kind}. Why tell me? Go and have {tip}.",
    ), (tip,))  # fmt: skip


_FEELINGS: dict[str, tuple[str, str]] = {
    "sad": ("I am sorry that you feel sad.", "Talk to a friend or take a short walk."),
    "tired": ("That sounds tiring.", "Take a break and get some sleep."),
    "happy": ("I am glad to hear that.", "Enjoy it and share it with a friend."),
    "bored": ("That happens to everyone.", "Try a book, a game or a walk."),
    "angry": ("That sounds hard.", "Take a deep breath and count to ten."),
    "nervous": ("It is normal to feel that way.", "Breathe slowly and take one step at a time."),
    "lonely": ("I am sorry that you feel lonely.", "Call someone you like."),
    "excited": ("That is great.", "Enjoy the moment."),
    "hungry": ("Then it is time to eat.", "A sandwich or some fruit is quick."),
    "sick": ("I am sorry to hear that.", "Rest, drink water and see a doctor if it gets worse."),
}


def feeling(rng: Random) -> Request:
    """Answer to a feeling with a tip."""
    name = rng.choice(tuple(_FEELINGS))
    first, tip = _FEELINGS[name]
    asks = (
        f"I am {name}.|I feel {name}.|I'm so {name} today.|I feel very {name} right now.|"
        f"I am {name}, what should I do?|I have been {name} all day."
    )
    return _talk("feeling", rng, asks, (
        f"{first} {tip}",
        f"Oh, I get that! {tip}",
        f"I understand. {tip} I remain at your disposal.",
        f"Thank you for telling me. {first} {tip}",
        tip,
        f"{first} {tip} Feelings come and go, and it is good to speak about them. Tell me more "
        "if you like.",
        f"So you are {name}. Not my problem, but here: {tip}",
    ), (tip,))  # fmt: skip


def compliment(rng: Random) -> Request:
    """Take praise."""
    asks = (
        "You are great!|Good job!|Well done!|I like you.|You are smart.|You are so helpful.|"
        "That was good.|Nice work!|You are funny."
    )
    return _talk("compliment", rng, asks, (
        "Thanks, that is kind of you!",
        "Aw, thanks! You're pretty cool too!",
        "I am honoured by your kind words.",
        "Thank you so much, you are very kind.",
        "Thanks.",
        "Thanks, that is kind of you! I am a small model, so it is good to hear that I was of "
        "use. Let us go on if you like.",
        "I know. Tell me something new.",
    ))  # fmt: skip


KINDS: tuple[Kind, ...] = (
    greet, how_are_you, thank, farewell, apologise, introduce, abilities, weather, feeling,
    compliment,
)  # fmt: skip
