"""Requests for help with a task: advice, recommendations, recipes, how-to steps, explanations.

Each row of a table is one subject with its answer in two or three parts, so a brief answer can
drop the later ones.
"""

from random import Random

from demo.request import Kind, Request

_EXPLAINED: dict[str, tuple[str, str]] = {
    "rain": ("Water rises as vapour, cools into clouds and falls as drops.",
             "The drops fall when they are too heavy for the air."),
    "the wind": ("Wind is air that moves from high pressure to low pressure.",
                 "The sun heats the land unevenly, and that sets the air in motion."),
    "a rainbow": ("A rainbow appears when sunlight is split by drops of rain.",
                  "Each colour leaves the drop at its own angle."),
    "snow": ("Snow is water that froze into tiny crystals inside a cloud.",
             "Each flake has six sides."),
    "gravity": ("Gravity is the force that pulls things towards each other.",
                "It keeps us on the ground and the moon near the earth."),
    "electricity": ("Electricity is the flow of tiny charged particles through a wire.",
                    "It gives us light, heat and motion."),
    "the seasons": ("Seasons change because the earth is tilted as it goes around the sun.",
                    "The half that leans to the sun has summer."),
    "day and night": ("The earth spins once a day, so each side sees the sun in turn.",
                      "The side turned away has night."),
    "a volcano": ("A volcano is a hole in the ground where melted rock comes out.",
                  "The melted rock is called lava."),
    "money": ("Money is a thing that people trade for goods and work.",
              "Without it we would have to swap things."),
    "the internet": ("The internet is a net of computers that send messages to each other.",
                     "Each message is cut into small packets."),
    "a computer": ("A computer is a machine that follows lists of simple steps very fast.",
                   "The lists are called programs."),
    "sleep": ("Sleep gives the body and the mind time to rest and repair.",
              "Most people need about eight hours."),
    "the heart": ("The heart is a muscle that pumps blood through the body.",
                  "It beats about once a second."),
    "tides": ("Tides come from the pull of the moon on the sea.",
              "There are about two high tides a day."),
    "ice": ("Ice is water that got so cold that it became hard.", "It floats, for it is light."),
    "a language model": ("A language model is a program that guesses the next word again and "
                         "again.",
                         "It learns from many examples of text."),
    "music": ("Music is sound put in order with rhythm and melody.",
              "People make it with voices and instruments."),
    "plants": ("Plants use sunlight, water and air to make their own food.",
               "They give off the oxygen that we breathe."),
    "recycling": ("Recycling turns used things into new things.", "It saves energy and keeps "
                  "waste out of nature."),
}  # fmt: skip


def explain(rng: Random) -> Request:
    """Explain a subject in two sentences."""
    topic = rng.choice(tuple(_EXPLAINED))
    first, second = _EXPLAINED[topic]
    forms = (
        "Explain {t}.",
        "Can you explain {t}?",
        "Explain {t} to me.",
        "Explain {t} to a child.",
        "Help me understand {t}.",
        "How would you explain {t}?",
        "Give me a simple explanation of {t}.",
    )
    text = rng.choice(forms).format(t=topic)
    return Request("explain", text, first, f"{first} {second}",
                   "That is the short version of a long story.", (first,))  # fmt: skip


_ADVICE: dict[str, tuple[str, str]] = {
    "sleep better": ("Go to bed at the same time every night.",
                     "Put your phone away an hour before."),
    "learn faster": ("Study a little every day.", "Test yourself instead of only reading."),
    "save money": ("Write down what you spend.", "Put some money aside on the first of the month."),
    "wake up early": ("Go to bed earlier and open the curtains.", "Put the alarm across the room."),
    "make friends": ("Join a club and ask people about themselves.", "Say hello first."),
    "stay healthy": ("Eat well, move every day and sleep enough.", "Drink plenty of water."),
    "stay calm": ("Breathe slowly and count to ten.", "A short walk helps too."),
    "write better": ("Use short sentences and read your text aloud.", "Cut words you do not need."),
    "learn a language": ("Practise with short talks every day.",
                         "Listen to songs and films in it."),
    "focus at work": ("Turn off alerts and do one task at a time.",
                      "Take a short break each hour."),
    "prepare for an exam": ("Start early and make a plan.", "Sleep well the night before."),
    "get fit": ("Start with short walks and do a little more each week.",
                "Pick a sport you enjoy."),
    "eat healthier": ("Eat more fruit and vegetables.", "Cook at home when you can."),
    "read more": ("Keep a book with you and read ten pages a day.", "Stop books that bore you."),
    "be on time": ("Leave ten minutes before you need to.", "Lay out your things at night."),
    "give a good talk": ("Know your first sentence by heart and speak slowly.", "Practise aloud."),
    "keep my room tidy": ("Give every thing a place.", "Clean up for five minutes each evening."),
    "be happier": ("Spend time with people you like.", "Note one good thing each day."),
}  # fmt: skip


def advise(rng: Random) -> Request:
    """Give two tips for a goal."""
    goal = rng.choice(tuple(_ADVICE))
    first, second = _ADVICE[goal]
    forms = (
        "How can I {g}?",
        "Give me advice on how to {g}.",
        "I want to {g}. Any advice?",
        "Do you have tips to {g}?",
        "What should I do to {g}?",
        "Help me {g}.",
        "Give me a tip to {g}.",
    )
    text = rng.choice(forms).format(g=goal)
    return Request("advise", text, first, f"{first} {second}",
                   "Small steps are easier to keep up than big ones.", (first,))  # fmt: skip


_PICKS: dict[str, tuple[str, str]] = {
    "book": ("Treasure Island", "It is a fine tale of the sea."),
    "film": ("The Wizard of Oz", "It is full of colour and songs."),
    "board game": ("chess", "It is easy to learn and hard to master."),
    "breakfast": ("oatmeal with fruit", "It is warm and keeps you full."),
    "lunch": ("a soup with bread", "It is quick and good for you."),
    "dinner": ("pasta with tomatoes", "Nearly everyone likes it."),
    "hobby": ("gardening", "It is calm and brings you outside."),
    "pet": ("a cat", "It is quiet and good company."),
    "sport": ("swimming", "It trains the whole body."),
    "city to visit": ("Paris", "It has fine food and great museums."),
    "gift": ("a good book", "It shows that you thought of the person."),
    "drink": ("mint tea", "It is fresh and good after a meal."),
    "dessert": ("apple pie", "It is best while still warm."),
    "colour for my room": ("light blue", "It is calm and goes with most things."),
    "instrument to learn": ("the guitar", "You can play songs on it quite soon."),
    "name for my cat": ("Luna", "It is short and soft."),
    "name for my dog": ("Max", "It is short and easy to call."),
    "snack": ("nuts and fruit", "They give you energy for hours."),
}


def recommend(rng: Random) -> Request:
    """Recommend one thing of a sort, and say why."""
    want = rng.choice(tuple(_PICKS))
    pick, why = _PICKS[want]
    forms = (
        "Recommend a {w}.",
        "Can you recommend a {w}?",
        "What is a good {w}?",
        "Suggest a {w}.",
        "I am looking for a good {w}.",
        "Which {w} would you pick?",
        "Any idea for a {w}?",
    )
    text = rng.choice(forms).format(w=want).replace(" a instrument", " an instrument")
    brief = pick[0].upper() + pick[1:] + "."
    return Request("recommend", text, brief, f"I recommend {pick}. {why}",
                   "In the end it depends on your taste.", (pick,))  # fmt: skip


_STEPS: dict[str, tuple[str, ...]] = {
    "make tea": ("Boil water.", "Put a tea bag in a cup.", "Pour in the water.",
                 "Wait three minutes."),
    "make coffee": ("Boil water.", "Put ground coffee in a filter.", "Pour the water over it.",
                    "Let it drip."),
    "boil an egg": ("Boil water in a pot.", "Put in the egg.", "Wait seven minutes.",
                    "Cool it in cold water."),
    "make pancakes": ("Mix flour, milk and eggs.", "Heat butter in a pan.", "Pour in some batter.",
                      "Turn it when it is golden."),
    "make a sandwich": ("Take two slices of bread.", "Spread some butter.", "Add cheese and salad.",
                        "Close it and cut it in half."),
    "make a salad": ("Wash the leaves.", "Cut some vegetables.", "Mix oil, vinegar and salt.",
                     "Stir it all together."),
    "cook rice": ("Wash the rice.", "Add twice as much water.", "Boil it, then turn down the heat.",
                  "Wait fifteen minutes."),
    "cook pasta": ("Boil water with salt.", "Put in the pasta.", "Stir now and then.",
                   "Drain it after ten minutes."),
    "make soup": ("Cut some vegetables.", "Fry them in a pot.", "Add water and salt.",
                  "Cook it for twenty minutes."),
    "bake bread": ("Mix flour, water, salt and yeast.", "Knead the dough.",
                   "Let it rise for an hour.", "Bake it for forty minutes."),
}  # fmt: skip
_CHORES: dict[str, tuple[str, ...]] = {
    "wash my hands": ("Wet your hands.", "Rub them with soap.", "Rinse them.", "Dry them well."),
    "plant a tree": ("Dig a hole.", "Put in the young tree.", "Fill the hole with earth.",
                     "Water it."),
    "change a light bulb": ("Turn off the light.", "Unscrew the old bulb.", "Screw in the new one.",
                            "Turn on the light."),
    "fix a flat tyre": ("Take off the wheel.", "Find the hole.", "Put a patch on it.",
                        "Pump up the tyre."),
    "wash a car": ("Rinse off the dirt.", "Wash it with soap.", "Rinse it again.", "Dry it."),
    "send a letter": ("Write the letter.", "Put it in an envelope.", "Add the address and a stamp.",
                      "Drop it in a mailbox."),
    "brush my teeth": ("Put paste on the brush.", "Brush for two minutes.", "Spit it out.",
                       "Rinse the brush."),
    "paint a wall": ("Cover the floor.", "Clean the wall.", "Paint the edges.", "Roll the rest."),
    "iron a shirt": ("Heat the iron.", "Start with the collar.", "Do the sleeves.", "Do the body."),
    "pack a suitcase": ("Make a list.", "Put heavy things at the bottom.", "Roll your clothes.",
                        "Put small things in the gaps."),
}  # fmt: skip


def _numbered(kind: str, text: str, steps: tuple[str, ...], done: str) -> Request:
    full = " ".join(f"{at}. {step}" for at, step in enumerate(steps, 1))
    return Request(kind, text, " ".join(steps), full, done, (steps[0], steps[-1]))


def recipe(rng: Random) -> Request:
    """List the steps for a dish or a drink."""
    dish = rng.choice(tuple(_STEPS))
    noun = dish.split(" ", 1)[1]
    forms = (
        "How do I {d}?",
        "Give me a recipe: {d}.",
        "Tell me how to {d}.",
        "What are the steps to {d}?",
        "I want to {d}, how does it work?",
        "Write the recipe for {n}.",
        "How do you {d}?",
    )
    text = rng.choice(forms).format(d=dish, n=noun)
    return _numbered("recipe", text, _STEPS[dish], "Enjoy your meal.")


def how_to(rng: Random) -> Request:
    """List the steps of a chore."""
    chore = rng.choice(tuple(_CHORES))
    forms = (
        "How do I {c}?",
        "Tell me how to {c}.",
        "What are the steps to {c}?",
        "Explain step by step how to {c}.",
        "Show me how to {c}.",
        "I need to {c}. What do I do?",
    )
    text = rng.choice(forms).format(c=chore)
    return _numbered("how_to", text, _CHORES[chore], "Take your time with each step.")


KINDS: tuple[Kind, ...] = (explain, advise, recommend, recipe, how_to)
