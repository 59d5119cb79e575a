"""The small world the demo model knows: things, countries, words and their relations.

Plain tables that several kinds of request share, so that a thing is described, sorted and defined
consistently. One line is one row; fields are separated by bars.
"""

# ruff: noqa: SIM905 - word tables read better as running text

from dataclasses import dataclass


@dataclass(frozen=True)
class Thing:
    """An everyday thing; `meaning` completes "A dog is ...", `details` are two sentences."""

    name: str
    group: str
    colour: str
    meaning: str
    details: tuple[str, str]


_THINGS = """
dog|animal|brown|a friendly animal that lives with people|It barks and wags its tail.|It likes to run and play.
cat|animal|grey|a small animal with soft fur|It purrs when it is happy.|It likes to sleep in warm places.
horse|animal|brown|a strong animal that people can ride|It eats grass and hay.|It can run very fast.
cow|animal|brown|a farm animal that gives milk|It eats grass all day.|It lives in a herd.
elephant|animal|grey|a huge animal with a long trunk|It has big ears and tusks.|It is the largest animal on land.
lion|animal|yellow|a big wild cat|It lives in a group called a pride.|The male has a mane.
rabbit|animal|white|a small animal with long ears|It hops and eats plants.|It lives in a burrow.
fox|animal|red|a clever wild animal with a bushy tail|It hunts at night.|It lives in a den.
bear|animal|brown|a large animal with thick fur|It sleeps through the winter.|It likes fish and honey.
mouse|animal|grey|a tiny animal with a long tail|It eats seeds and cheese.|It hides in small holes.
owl|bird|brown|a bird that is awake at night|It has large round eyes.|It flies without a sound.
parrot|bird|green|a bright bird that can copy words|It lives in warm forests.|It has a curved beak.
penguin|bird|black|a bird that swims but cannot fly|It lives in cold places.|It eats fish.
eagle|bird|brown|a large bird that hunts|It has very sharp eyes.|It builds its nest up high.
shark|fish|grey|a large fish with sharp teeth|It lives in the sea.|It can smell food from far away.
salmon|fish|pink|a fish that swims up rivers|It is born in fresh water.|Many people eat it.
bee|insect|yellow|an insect that makes honey|It collects nectar from flowers.|It lives in a hive.
ant|insect|black|a tiny insect that works in large groups|It can carry heavy loads.|It lives in a colony.
butterfly|insect|orange|an insect with large bright wings|It begins life as a caterpillar.|It drinks from flowers.
apple|fruit|red|a round fruit that grows on a tree|It is sweet and crunchy.|People eat it raw or in pies.
banana|fruit|yellow|a long soft fruit with a thick peel|It grows in warm countries.|Monkeys like it too.
orange|fruit|orange|a round fruit full of juice|It tastes sweet and a little sour.|It is rich in vitamin C.
grape|fruit|purple|a small fruit that grows in bunches|It can be green or purple.|Wine is made from it.
lemon|fruit|yellow|a sour fruit with a thick skin|It is used in drinks and cakes.|It has a fresh smell.
strawberry|fruit|red|a soft sweet fruit with tiny seeds|It grows close to the ground.|It goes well with cream.
carrot|vegetable|orange|a crunchy root that people eat|It grows under the ground.|Rabbits love it.
potato|vegetable|brown|a root that is cooked in many ways|It can be boiled, baked or fried.|Chips are made from it.
tomato|vegetable|red|a juicy plant used in salads and sauces|It is soft and a little sweet.|It needs sun to ripen.
onion|vegetable|white|a round vegetable with many layers|It can make you cry.|It gives taste to many dishes.
spinach|vegetable|green|a plant with soft green leaves|It is full of iron.|It can be eaten raw or cooked.
hammer|tool|grey|a tool for driving nails|It has a heavy head and a handle.|Builders use it every day.
saw|tool|grey|a tool for cutting wood|It has a row of sharp teeth.|You move it back and forth.
screwdriver|tool|yellow|a tool for turning screws|Its tip fits into the screw.|It comes in many sizes.
shovel|tool|grey|a tool for digging|It has a long handle and a flat blade.|Gardeners use it.
chair|piece of furniture|brown|a seat for one person|It has four legs and a back.|It often stands at a table.
table|piece of furniture|brown|a flat top that stands on legs|People eat and work at it.|It is often made of wood.
bed|piece of furniture|white|a place to sleep|It has a soft mattress.|You lie on it at night.
sofa|piece of furniture|grey|a soft seat for several people|It stands in the living room.|It is good for a nap.
car|vehicle|red|a machine with four wheels that carries people|It drives on roads.|It has an engine.
bicycle|vehicle|blue|a vehicle with two wheels and pedals|You ride it with your own power.|It is good for short trips.
train|vehicle|green|a long vehicle that runs on rails|It stops at stations.|It carries many people.
boat|vehicle|white|a vehicle that floats on water|It may have a sail or a motor.|People fish from it.
airplane|vehicle|white|a machine that flies|It has two wings.|It takes people to far countries.
piano|instrument|black|a large instrument with black and white keys|You play it with your fingers.|It has strings inside.
guitar|instrument|brown|an instrument with six strings|You play it with your hand or a pick.|It is used in many songs.
drum|instrument|red|an instrument that you hit|It gives a song its beat.|It can be very loud.
shirt|piece of clothing|white|a thing you wear on your upper body|It often has buttons.|It can have long or short sleeves.
hat|piece of clothing|black|a thing you wear on your head|It keeps off the sun and the cold.|It comes in many shapes.
shoe|piece of clothing|black|a thing you wear on your foot|It protects your foot.|You need two of them.
coffee|drink|brown|a hot drink made from roasted beans|It helps people wake up.|Some add milk and sugar.
tea|drink|green|a drink made from leaves and hot water|It can be green or black.|It is drunk all over the world.
milk|drink|white|a white drink that comes from cows|It is good for your bones.|Cheese is made from it.
rose|flower|red|a flower with a sweet smell|Its stem has thorns.|It is a sign of love.
sunflower|flower|yellow|a tall flower that turns to the sun|It has big yellow petals.|Its seeds are good to eat.
tulip|flower|red|a spring flower shaped like a cup|It grows from a bulb.|It comes in many colours.
"""  # noqa: E501

THINGS: tuple[Thing, ...] = tuple(
    Thing(name, group, colour, meaning, (first, second))
    for name, group, colour, meaning, first, second in (
        line.split("|") for line in _THINGS.strip().splitlines()
    )
)

GROUPS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "orange", "grape", "lemon", "strawberry", "pear"),
    "vegetables": ("carrot", "potato", "tomato", "onion", "spinach", "pea", "cabbage"),
    "animals": ("dog", "cat", "horse", "cow", "elephant", "lion", "rabbit"),
    "birds": ("owl", "parrot", "penguin", "eagle", "robin", "duck", "swan"),
    "tools": ("hammer", "saw", "screwdriver", "shovel", "drill", "axe"),
    "vehicles": ("car", "bicycle", "train", "boat", "airplane", "bus", "truck"),
    "instruments": ("piano", "guitar", "drum", "violin", "flute", "trumpet"),
    "drinks": ("coffee", "tea", "milk", "water", "juice", "lemonade"),
    "flowers": ("rose", "sunflower", "tulip", "lily", "daisy", "violet"),
    "colours": ("red", "blue", "green", "yellow", "purple", "orange", "white"),
    "countries": ("France", "Italy", "Spain", "Japan", "Brazil", "Egypt", "Canada"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn"),
    "sports": ("football", "tennis", "swimming", "running", "cycling", "golf"),
    "clothes": ("shirt", "hat", "shoe", "coat", "scarf", "sock"),
    "jobs": ("teacher", "doctor", "baker", "farmer", "nurse", "driver"),
    "shapes": ("circle", "square", "triangle", "star", "oval", "cube"),
}

CAPITALS: dict[str, str] = dict(
    pair.split(":")
    for pair in (
        "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Japan:Tokyo China:Beijing "
        "Egypt:Cairo Greece:Athens Russia:Moscow England:London Portugal:Lisbon Austria:Vienna "
        "Norway:Oslo Sweden:Stockholm Poland:Warsaw Ireland:Dublin Canada:Ottawa Kenya:Nairobi "
        "Cuba:Havana Peru:Lima India:Delhi Turkey:Ankara Finland:Helsinki Hungary:Budapest"
    ).split()
)

OPPOSITES: dict[str, str] = dict(
    pair.split(":")
    for pair in (
        "hot:cold big:small up:down left:right day:night black:white fast:slow high:low "
        "happy:sad old:young open:closed wet:dry rich:poor hard:soft light:dark early:late "
        "full:empty strong:weak long:short near:far clean:dirty good:bad thick:thin loud:quiet "
        "true:false first:last easy:difficult sweet:sour begin:end push:pull buy:sell win:lose"
    ).split()
)

PLURALS: dict[str, str] = {
    "child": "children", "man": "men", "woman": "women", "foot": "feet", "tooth": "teeth",
    "mouse": "mice", "goose": "geese", "sheep": "sheep", "leaf": "leaves", "knife": "knives",
    "city": "cities", "baby": "babies", "berry": "berries", "box": "boxes", "bus": "buses",
    "dish": "dishes", "watch": "watches", "cat": "cats", "dog": "dogs", "book": "books",
    "tree": "trees", "car": "cars", "house": "houses", "apple": "apples", "friend": "friends",
    "river": "rivers", "story": "stories", "potato": "potatoes", "wolf": "wolves", "key": "keys",
}  # fmt: skip

PASTS: dict[str, str] = dict(
    pair.split(":")
    for pair in (
        "go:went eat:ate see:saw run:ran take:took give:gave write:wrote sing:sang come:came "
        "make:made buy:bought think:thought find:found play:played walk:walked talk:talked "
        "jump:jumped help:helped drink:drank swim:swam begin:began know:knew sleep:slept"
    ).split()
)

RHYMES: tuple[tuple[str, ...], ...] = tuple(
    tuple(row.split())
    for row in (
        "cat hat bat mat,dog fog log,sun fun run,tree bee sea,house mouse,light night bright,"
        "rain train plane,star car far,day play way,boat coat goat,king ring sing,moon spoon soon,"
        "ball tall wall,cake lake snake,door floor more,bed red head,fish dish wish,nose rose"
    ).split(",")
)

TRANSLATIONS: dict[str, dict[str, str]] = {
    "French": dict(
        p.split(":")
        for p in (
            "hello:bonjour cat:chat dog:chien water:eau bread:pain house:maison red:rouge yes:oui "
            "no:non sun:soleil book:livre thanks:merci friend:ami night:nuit milk:lait one:un"
        ).split()
    ),
    "Spanish": dict(
        p.split(":")
        for p in (
            "hello:hola cat:gato dog:perro water:agua bread:pan house:casa red:rojo yes:sí no:no "
            "sun:sol book:libro thanks:gracias friend:amigo night:noche milk:leche one:uno"
        ).split()
    ),
    "German": dict(
        p.split(":")
        for p in (
            "hello:hallo cat:Katze dog:Hund water:Wasser bread:Brot house:Haus red:rot yes:ja "
            "no:nein sun:Sonne book:Buch thanks:danke friend:Freund night:Nacht milk:Milch one:eins"
        ).split()
    ),
}

SOUNDS: dict[str, str] = dict(
    pair.split(":")
    for pair in (
        "dog:woof cat:meow cow:moo sheep:baa duck:quack pig:oink horse:neigh lion:roar bee:buzz "
        "owl:hoot frog:croak snake:hiss mouse:squeak rooster:cock-a-doodle-doo wolf:howl goat:maa"
    ).split()
)

SIZES: tuple[str, ...] = tuple(
    "ant,mouse,cat,dog,lion,horse,car,elephant,house,mountain,moon,sun".split(",")
)
"""From small to big."""

COLOURS_OF: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black",
    "the sun": "yellow", "blood": "red", "a carrot": "orange", "milk": "white", "a leaf": "green",
    "chocolate": "brown", "a ripe tomato": "red", "the sea": "blue", "an elephant": "grey",
    "a lemon": "yellow", "a cherry": "red", "night": "black", "a flamingo": "pink",
}  # fmt: skip

PURPOSES: dict[str, str] = {
    "hammer": "driving nails", "knife": "cutting things", "pen": "writing", "cup": "drinking",
    "clock": "telling the time", "lamp": "giving light", "key": "opening locks",
    "umbrella": "staying dry in the rain", "phone": "calling people", "bed": "sleeping",
    "broom": "sweeping the floor", "oven": "baking food", "fridge": "keeping food cold",
    "map": "finding the way", "soap": "washing", "camera": "taking pictures",
    "needle": "sewing", "ladder": "climbing up", "book": "reading", "spoon": "eating soup",
}  # fmt: skip

HOMES: dict[str, str] = {
    "bee": "a hive", "bird": "a nest", "fish": "the water", "rabbit": "a burrow",
    "lion": "the savanna",
    "polar bear": "the Arctic", "camel": "the desert", "spider": "a web", "fox": "a den",
    "cow": "a farm", "monkey": "the jungle", "whale": "the ocean", "ant": "a colony",
    "penguin": "cold southern lands", "horse": "a stable", "bat": "a cave",
}  # fmt: skip

DAYS: tuple[str, ...] = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS: tuple[str, ...] = tuple(
    "January February March April May June July August September October November December".split()
)

WORDS: tuple[str, ...] = tuple(
    (
        "apple bread chair dance earth flower garden house island jacket kitchen lemon mountain "
        "night ocean paper queen river stone table umbrella village water yellow zebra animal "
        "bottle candle dragon engine forest guitar hammer insect jungle kettle ladder mirror "
        "number orange pencil rabbit school ticket window winter summer spring autumn cat dog "
        "sun moon star tree book fish bird cake milk snow rain wind fire gold lamp door ring king "
        "ship train plane car bus road city farm field grass leaf root seed cloud storm light "
        "dark green black white brown music story poem letter word happy brave quiet strong sweet "
        "fresh smart clean plant tiger horse mouse snake eagle shark whale panda koala hello world "
        "friend mother father sister brother teacher doctor baker butter cheese pizza salad tomato "
        "carrot onion potato spoon fork knife plate glass clock phone radio robot rocket planet "
        "circle square heart magic dream sleep smile laugh voice hand foot head nose"
    ).split()
)
"""Words for tasks about letters."""
