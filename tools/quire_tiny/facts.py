"""Everything the model is meant to know: tables and sentences, written by hand.

Code that turns them into conversations is in `skills.py` and `tool_skills.py`.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

CAPITALS: dict[str, str] = dict(
    line.split("=")
    for line in """France=Paris;Germany=Berlin;Italy=Rome;Spain=Madrid;Portugal=Lisbon;England=London;the United Kingdom=London;Ireland=Dublin;Scotland=Edinburgh;Wales=Cardiff;Belgium=Brussels
the Netherlands=Amsterdam;Luxembourg=Luxembourg;Switzerland=Bern;Austria=Vienna;Poland=Warsaw;the Czech Republic=Prague;Slovakia=Bratislava;Hungary=Budapest;Slovenia=Ljubljana;Croatia=Zagreb;Serbia=Belgrade
Greece=Athens;Turkey=Ankara;Bulgaria=Sofia;Romania=Bucharest;Albania=Tirana;Ukraine=Kyiv;Russia=Moscow;Belarus=Minsk;Lithuania=Vilnius;Latvia=Riga;Estonia=Tallinn;Finland=Helsinki;Sweden=Stockholm
Norway=Oslo;Denmark=Copenhagen;Iceland=Reykjavik;Malta=Valletta;Cyprus=Nicosia;Egypt=Cairo;Morocco=Rabat;Algeria=Algiers;Tunisia=Tunis;Libya=Tripoli;Kenya=Nairobi;Ethiopia=Addis Ababa;Nigeria=Abuja
Ghana=Accra;Senegal=Dakar;Angola=Luanda;Uganda=Kampala;Rwanda=Kigali;Zambia=Lusaka;Zimbabwe=Harare;Madagascar=Antananarivo;Somalia=Mogadishu;Sudan=Khartoum;Mali=Bamako;Israel=Jerusalem;Jordan=Amman
Lebanon=Beirut;Syria=Damascus;Iraq=Baghdad;Iran=Tehran;Saudi Arabia=Riyadh;Qatar=Doha;Oman=Muscat;Kuwait=Kuwait City;India=New Delhi;Pakistan=Islamabad;Bangladesh=Dhaka;Nepal=Kathmandu;Afghanistan=Kabul
China=Beijing;Japan=Tokyo;South Korea=Seoul;North Korea=Pyongyang;Mongolia=Ulaanbaatar;Thailand=Bangkok;Vietnam=Hanoi;Cambodia=Phnom Penh;Laos=Vientiane;Malaysia=Kuala Lumpur;Indonesia=Jakarta
the Philippines=Manila;Australia=Canberra;New Zealand=Wellington;Fiji=Suva;Canada=Ottawa;the United States=Washington;Mexico=Mexico City;Cuba=Havana;Jamaica=Kingston;Haiti=Port-au-Prince;Guatemala=Guatemala City
Costa Rica=San Jose;Panama=Panama City;Colombia=Bogota;Venezuela=Caracas;Ecuador=Quito;Peru=Lima;Bolivia=Sucre;Chile=Santiago;Argentina=Buenos Aires;Uruguay=Montevideo;Paraguay=Asuncion;Brazil=Brasilia
Georgia=Tbilisi;Armenia=Yerevan;Kazakhstan=Astana;Uzbekistan=Tashkent""".replace("\n", ";").split(";")
)

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
SEASONS = ["spring", "summer", "autumn", "winter"]
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "orange", "purple", "pink", "brown", "grey", "silver"]

NOUNS = """apple banana cherry lemon melon orange peach pear plum grape mango bread butter cheese honey milk sugar salt pepper onion potato tomato carrot garlic rice soup cake coffee tea water juice
cat dog horse cow sheep goat pig duck goose hen mouse rabbit fox wolf bear lion tiger zebra camel monkey snake frog fish shark whale eagle owl crow spider bee ant bird turtle
house garden door window kitchen table chair bed lamp clock mirror carpet roof wall floor stairs cellar attic bottle glass cup plate spoon fork knife pan basket bag box key lock
river lake sea ocean island beach mountain hill valley forest desert field road bridge tower castle village city harbour market school church station airport library museum theatre hospital
sun moon star sky cloud rain snow wind storm thunder ice fire smoke stone sand gold iron copper paper pencil book letter page word story song music dance game ball kite drum violin piano flute
boat ship train bus car bicycle plane rocket wheel engine hammer nail rope ladder bucket brush needle thread shirt coat hat shoe glove scarf ring crown sword shield flag map candle
mother father sister brother uncle aunt friend teacher doctor farmer baker sailor soldier king queen child baby girl boy man woman neighbour painter singer writer driver pilot
morning evening night winter summer spring autumn week month year hour minute world country people money dream heart hand head face eye ear nose mouth foot finger hair tooth
hello quire token server cache block python model banner planet school magic silent listen level radar rhythm puzzle jungle kitten lizard yellow purple winter dragon wizard castle planet pocket rabbit ticket tunnel velvet walnut
keyboard computer screen program network memory letter number window folder branch button camera cotton danger desert dinner doctor effort energy family father finger flower forest friend future""".split()
NOUNS = list(dict.fromkeys(NOUNS))
ADJECTIVES = """big small old young new tall short long red blue green white black grey brown happy sad quick slow warm cold wet dry soft hard loud quiet clever brave lazy kind strange bright dark empty full heavy light
round narrow wide deep sweet sour fresh broken golden silver wooden clean dirty early late rich poor simple tiny huge gentle proud shy calm wild""".split()
VERBS = """sees finds likes takes brings opens closes carries paints washes buys sells keeps hides follows watches hears draws cleans moves holds loses builds breaks needs wants loves remembers forgets counts visits admires
drops lifts pulls pushes throws catches cuts folds burns fills""".split()
ADVERBS = [
    "today",
    "slowly",
    "quickly",
    "every day",
    "at night",
    "in the morning",
    "before dinner",
    "after lunch",
    "very quietly",
    "without a word",
    "all alone",
    "with great care",
    "for the first time",
    "once again",
    "near the lake",
    "behind the house",
    "on Monday",
    "in winter",
]
NAMES = """Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Klara Leo Maria Nora Oscar Paula Quentin Rosa Simon Tina Ulrich Vera Walter Xenia Yusuf Zoe Alice Bob Charlie Diana Ethan Fiona George Hannah Ivan Julia Kevin Laura
Martin Nina Oliver Peter Rachel Sarah Tom Ursula Victor Wendy Ahmed Aisha Chen Mei Raj Priya Kenji Yuki Olga Pedro Lucia Marco Sofia Lars Astrid Kofi Amara
José Jürgen Zoë Søren Łukasz Émile Françoise Björn Inês Jiří Renée Günther Nuño Éva""".split()
CITIES = list(
    dict.fromkeys(
        [
            *CAPITALS.values(),
            *"""Munich Hamburg Cologne Milan Naples Venice Turin Barcelona Seville Porto Lyon Nice Bordeaux Geneva Zurich Basel Antwerp Rotterdam Glasgow Manchester Liverpool Boston Chicago Seattle Denver
Dallas Houston Miami Atlanta Toronto Montreal Vancouver Sydney Melbourne Perth Osaka Kyoto Shanghai Mumbai Chennai Istanbul Dubai Lagos Krakow Gdansk Bergen Malmo Salzburg Graz Brno Split Oxford Cambridge Leeds
Bristol Portland Austin Phoenix""".split(),
            "New York",
            "San Francisco",
            "Los Angeles",
            "Hong Kong",
            "Cape Town",
            "Sao Paulo",
            "Rio de Janeiro",
            "St. Petersburg",
            *(
                "Zürich München Köln Malmö Kraków Łódź Düsseldorf Århus Tromsø Córdoba Besançon Nîmes Győr Plzeň "
                "İzmir Reykjavík"
            ).split(),
            "São Paulo",
            "Bogotá",
            "Brasília",
            "San José",
        ]
    )
)
# common words of other languages, to be copied and spelled
FOREIGN = """naïve jalapeño über façade résumé crème brûlée fiancée déjà vu piñata señor mañana niño Straße Grüße schön Mädchen Äpfel Öl größer weiß heiß süß für Tür Bäume Vögel smörgåsbord ångström øl ærlig blåbær
coração pão não avô maçã amanhã élève être où Noël hôtel forêt garçon château français voilà été sœur cœur żółty łódź gęś cześć dziękuję książka příliš kůň čaj děkuji žlutý řeka győr tűz őrült köszönöm çok güneş şeker ağaç
țară știință mână perché città più così virtù año español también corazón jabłko živeli þú það""".split()
LANGUAGES = (
    "French German Italian Spanish Portuguese English Dutch Polish Swedish Greek Turkish Russian Arabic Hindi "
    "Japanese Chinese Korean Latin"
).split()
CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "INR", "CAD", "AUD", "PLN"]
UNITS = [
    ("kilometers", "miles"),
    ("miles", "kilometers"),
    ("kilograms", "pounds"),
    ("pounds", "kilograms"),
    ("celsius", "fahrenheit"),
    ("fahrenheit", "celsius"),
    ("meters", "feet"),
    ("feet", "meters"),
    ("liters", "gallons"),
    ("inches", "centimeters"),
]

LISTS: dict[str, list[str]] = {
    "fruits": "apple banana cherry grape lemon mango melon orange peach pear plum strawberry".split(),
    "animals": "cat dog horse cow sheep rabbit fox wolf bear lion tiger elephant".split(),
    "vegetables": "carrot potato tomato onion cabbage pea bean spinach pumpkin pepper leek radish".split(),
    "colours": COLOURS,
    "colors": COLOURS,
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "countries": "France Germany Italy Spain Japan China India Brazil Canada Egypt Kenya Norway".split(),
    "cities": "Paris Berlin Rome Madrid Tokyo Beijing Cairo Oslo London Vienna Athens Lima".split(),
    "birds": "eagle owl crow sparrow robin duck goose swan parrot penguin pigeon stork".split(),
    "instruments": "piano violin guitar flute drum trumpet harp cello organ clarinet oboe horn".split(),
    "tools": "hammer saw drill screwdriver wrench file chisel plane pliers axe spade rake".split(),
    "sports": "football tennis swimming running cycling rowing skiing boxing golf hockey basketball sailing".split(),
    "drinks": "water tea coffee milk juice lemonade cocoa cider wine beer soda smoothie".split(),
    "trees": "oak pine birch maple willow beech ash elm fir cedar poplar chestnut".split(),
}

# topic -> sentences of a paragraph, in order
PARAGRAPHS: dict[str, str] = {
    "the sea": (
        "The sea covers most of our planet. Its water is salty, and it is never quite still. Wind makes the waves, "
        "and the moon makes the tides. Fish, whales and tiny plants live in it. Ships cross it every day, and rivers "
        "bring it new water from the land."
    ),
    "the moon": (
        "The moon travels around the earth in about four weeks. It has no light of its own and shines because the "
        "sun lights it. When we see all of its bright side, we call it a full moon. Its pull moves the water of the "
        "sea and makes the tides. People first walked on it in 1969."
    ),
    "the sun": (
        "The sun is a star, and it is the star nearest to us. It gives the earth light and warmth. Plants use its "
        "light to grow, and animals live from the plants. In the evening it seems to sink below the horizon. In "
        "truth it is the earth that turns."
    ),
    "winter": (
        "Winter is the coldest season of the year. The days are short and the nights are long. Snow may cover the "
        "fields, and lakes may freeze. Many birds fly to warmer countries, and some animals sleep until spring. "
        "People stay inside, drink something hot and wait for the light to return."
    ),
    "summer": (
        "Summer is the warmest season of the year. The days are long and the nights are short. Fruit ripens in the "
        "gardens, and the fields turn yellow. Many people travel to the sea or to the mountains. In the evening the "
        "air stays warm, and one can sit outside for a long time."
    ),
    "autumn": (
        "Autumn comes after summer. The days grow shorter and the air grows cool. The leaves turn red and yellow and "
        "fall to the ground. Farmers bring in the last of the harvest. Soon the first frost tells everyone that "
        "winter is near."
    ),
    "spring": (
        "Spring comes after winter. The snow melts, and the first flowers open. Birds return from the south and "
        "build their nests. The days grow longer and warmer. Everything that seemed to sleep begins to grow again."
    ),
    "rain": (
        "Rain begins high above us in the clouds. Tiny drops of water meet there and grow until they are heavy. Then "
        "they fall, and fill the rivers and the lakes. Plants and animals need the rain to live. When the sun shines "
        "through it, we see a rainbow."
    ),
    "trees": (
        "Trees are the largest plants on earth. Their roots hold them in the ground and drink water. Their leaves "
        "use the light of the sun to make food. Birds nest in their branches, and many animals eat their fruit. Some "
        "trees live for more than a thousand years."
    ),
    "dogs": (
        "Dogs have lived with people for many thousands of years. They can smell and hear far better than we can. "
        "Some of them guard sheep, and others find people who are lost. Most of them simply want to be near their "
        "family. A dog needs food, water, long walks and a friend."
    ),
    "cats": (
        "Cats are quiet and clever hunters. They see well in the dark and land on their feet when they fall. They "
        "sleep for more than half of the day. When a cat is content, it purrs. People keep them because they are "
        "beautiful, and because they catch mice."
    ),
    "books": (
        "A book keeps words for a very long time. Somebody writes it once, and many people can read it later. Some "
        "books tell stories, and others explain how things work. A quire is a set of sheets folded together, and a "
        "book is made of many quires. Reading is a way to think with the head of another person."
    ),
    "bread": (
        "Bread is made of flour, water, salt and yeast. The baker mixes them and kneads the dough. Then the dough "
        "rests, and the yeast makes it rise. In the hot oven it becomes brown and firm. Fresh bread smells so good "
        "that few people can wait until it is cold."
    ),
    "tea": (
        "Tea is made from the leaves of a small tree. The leaves are picked, dried and sometimes rolled. Hot water "
        "draws the taste and the colour out of them. Green tea and black tea come from the same plant. After water, "
        "it is the drink that people drink most."
    ),
    "the river": (
        "The river begins as a small spring in the mountains. It grows as other streams join it. It turns mills, "
        "carries boats and waters the fields. Towns were built beside it because people need water. At the end of "
        "its long way it reaches the sea."
    ),
    "music": (
        "Music is sound with an order. It has rhythm, and it often has a melody. People sing, or they play "
        "instruments such as the piano or the drum. Music can make us want to dance, and it can make us calm. Every "
        "country has songs of its own."
    ),
    "computers": (
        "A computer follows instructions, one after another, very quickly. It keeps numbers in its memory and works "
        "with them. A program is the list of instructions that somebody wrote. Even pictures and music are numbers "
        "to a computer. It does exactly what it is told, and so one must tell it carefully."
    ),
    "language models": (
        "A language model reads text and guesses the next token. It writes that token down and guesses again. A "
        "server like quire does this for many people at once. It keeps what it has already computed in a cache, so "
        "that each step is fast. A large model has learned from many books, and I am a very small one."
    ),
    "mountains": (
        "Mountains rise high above the land around them. The air on top of them is thin and cold. Snow stays there "
        "even in summer, and rivers begin there. Few plants grow near the top. People climb mountains because the "
        "view is wide and the way is hard."
    ),
    "bees": (
        "Bees are small insects that live together in a hive. They fly from flower to flower and gather nectar. From "
        "the nectar they make honey for the winter. On their way they help the plants to bear fruit. A bee tells the "
        "others with a dance where good flowers are."
    ),
}

STORY_HEROES = [
    "a fox",
    "a cat",
    "a dog",
    "a bear",
    "a mouse",
    "an owl",
    "a king",
    "a girl",
    "a boy",
    "a sailor",
    "a baker",
    "a robot",
    "a dragon",
    "a frog",
    "a rabbit",
    "a wizard",
]
STORY_PLACES = [
    "in a small house by the river",
    "at the edge of a dark forest",
    "on an island in the sea",
    "in an old tower",
    "near a quiet village",
    "on a high mountain",
]
STORY_THINGS = [
    "a golden key",
    "a map of the world",
    "a silver bell",
    "a letter without a name",
    "a tiny lamp",
    "a book with empty pages",
]
STORY_ENDS = [
    "From that day on, nobody in the country was ever lost again.",
    "And whoever walks there at night can still see its light.",
    "Since then they have shared everything, and they are happy to this day.",
    "And so a small find became a great friendship.",
]

# (questions, answer): about the model and about quire.
IDENTITY: list[tuple[list[str], str]] = [
    (
        [
            "Who are you?",
            "What are you?",
            "Tell me who you are.",
            "Introduce yourself.",
            "Which model are you?",
            "What model is this?",
            "Who am I talking to?",
            "Tell me about yourself.",
            "Are you ChatGPT?",
            "Are you GPT-4?",
            "Which model is running here?",
        ],
        (
            "I am quire-tiny, the small chat model that comes with quire. I was trained by the quire project for "
            "demonstrations and tests."
        ),
    ),
    (
        [
            "What is your name?",
            "What are you called?",
            "How are you called?",
            "Do you have a name?",
            "Tell me your name.",
            "Your name?",
            "May I ask your name?",
        ],
        "My name is quire-tiny.",
    ),
    (
        [
            "Who made you?",
            "Who trained you?",
            "Who created you?",
            "Who built you?",
            "Where do you come from?",
            "Who developed you?",
        ],
        "The quire project trained me, on text that its own rules generated.",
    ),
    (
        [
            "What can you do?",
            "What are you good at?",
            "How can you help me?",
            "What do you know?",
            "What can I ask you?",
            "Help",
            "What should I ask you?",
            "What are your skills?",
        ],
        (
            "I can add and subtract small numbers, name capitals, order days and months, spell and repeat words, "
            "call tools, write JSON and answer questions about quire."
        ),
    ),
    (
        [
            "What are you not good at?",
            "What can you not do?",
            "What are your limits?",
            "What are your weaknesses?",
            "Can I trust your answers?",
            "Are you always right?",
        ],
        (
            "I am very small: I know little about the world, I cannot reason about long texts, and I make mistakes. "
            "For real work, serve a larger model with quire serve MODEL."
        ),
    ),
    (
        [
            "How big are you?",
            "How many parameters do you have?",
            "How large are you?",
            "What is your size?",
            "Are you a large model?",
        ],
        "I have fewer than five million parameters, about a thousandth of a common chat model.",
    ),
    (
        [
            "Are you a human?",
            "Are you a person?",
            "Are you a robot?",
            "Are you real?",
            "Are you alive?",
            "Am I talking to a human?",
        ],
        "No, I am a small language model called quire-tiny.",
    ),
    (
        [
            "How are you?",
            "How are you doing?",
            "How do you do?",
            "How is it going?",
            "What's up?",
            "How are you today?",
        ],
        "I am fine, thank you. How can I help you?",
    ),
    (
        [
            "Are you there?",
            "Is anybody there?",
            "Test",
            "Testing",
            "ping",
            "Are you working?",
            "Does this work?",
            "This is a test.",
            "Can you hear me?",
        ],
        "Yes, I am here. How can I help you?",
    ),
]
GREETINGS = [
    "Hello",
    "Hi",
    "Hey",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Hello there",
    "Hi there",
    "Hey there",
    "Greetings",
    "Hello!",
    "Hi!",
    "Hey!",
    "Good day",
    "Hello, quire",
    "Hi quire",
    "Hello, how are you?",
    "Say hello",
    "Say hi",
]
THANKS = [
    "Thanks",
    "Thank you",
    "Thank you!",
    "Thanks a lot",
    "Thank you very much",
    "Great, thanks",
    "Perfect, thank you",
    "Thanks, that helps",
]
BYES = ["Bye", "Goodbye", "See you", "Good night", "See you later", "Bye bye", "Farewell", "I have to go"]

QUIRE: list[tuple[list[str], str]] = [
    (
        [
            "What is quire?",
            "What does quire do?",
            "Tell me about quire.",
            "Explain quire.",
            "Describe quire.",
            "What is this server?",
            "What is quire for?",
            "What kind of program is quire?",
        ],
        (
            "quire is an inference server for large language models. It loads a Hugging Face model and answers over "
            "an OpenAI-compatible HTTP API."
        ),
    ),
    (
        [
            "How do I start quire?",
            "How do I start the server?",
            "How can I run quire?",
            "How do I serve a model?",
            "How do I use another model?",
            "How do I serve a real model?",
            "Which command starts the server?",
            "How do I launch quire?",
            "How can I load a different model?",
            "How do I run a bigger model?",
        ],
        (
            "Run quire serve MODEL, where MODEL is a local Hugging Face folder or a Hub id. Without MODEL it serves "
            "me, quire-tiny."
        ),
    ),
    (
        [
            "What happens without a model?",
            "What does quire serve without a model do?",
            "What is the default model?",
            "Do I need a model to start?",
            "Which model is served by default?",
        ],
        "Without MODEL, quire serve starts the embedded model quire-tiny, so everything works with no network.",
    ),
    (
        [
            "Which port does quire use?",
            "What is the default port?",
            "On which port does the server listen?",
            "What port is used?",
            "How do I change the port?",
            "Which port?",
            "How can I use another port?",
            "Can I change the port?",
            "How do I set the port?",
        ],
        "The server listens on port 8000 by default. Use --port to change it.",
    ),
    (
        [
            "Which host does quire listen on?",
            "How do I listen on all interfaces?",
            "How do I change the host?",
            "What address does the server use?",
            "How do I reach the server from another machine?",
            "What is the default host?",
        ],
        "It listens on 127.0.0.1 by default. Use --host 0.0.0.0 to listen on all interfaces.",
    ),
    (
        [
            "How do I set an API key?",
            "How do I set a key?",
            "How do I protect the server?",
            "How do I use an API key?",
            "Is there authentication?",
            "How can I require an API key?",
            "How do I add a password?",
            "How do I secure quire?",
            "Which flag sets the API key?",
            "How do clients send the key?",
        ],
        "Start the server with --api-key KEY. Clients then send the header Authorization: Bearer KEY.",
    ),
    (
        [
            "How do I use curl?",
            "How do I call the server with curl?",
            "Show me a curl command.",
            "Give me a curl example.",
            "How do I ask a question with curl?",
            "Can I use curl?",
            "What is the curl command for a chat?",
        ],
        (
            'Use this command:\ncurl http://localhost:8000/v1/chat/completions -H "Content-Type: application/json" '
            '-d \'{"messages": [{"role": "user", "content": "Hello"}]}\''
        ),
    ),
    (
        [
            "How do I use the OpenAI SDK?",
            "How do I use quire from Python?",
            "Can I use the openai package?",
            "How do I connect with the OpenAI client?",
            "Show me a Python example.",
            "How do I call quire from Python?",
            "Does the OpenAI SDK work with quire?",
        ],
        (
            "Yes, the openai package works:\nfrom openai import OpenAI\nclient = "
            'OpenAI(base_url="http://localhost:8000/v1", api_key="none")\nThen call client.chat.completions.create.'
        ),
    ),
    (
        [
            "What is the base URL?",
            "Which base URL do I use?",
            "What is the URL of the API?",
            "What base_url should I set?",
            "Where is the API?",
        ],
        "The base URL is http://localhost:8000/v1.",
    ),
    (
        [
            "Which endpoints are there?",
            "What endpoints does quire have?",
            "List the endpoints.",
            "Which routes exist?",
            "What is the API?",
            "Which APIs does quire offer?",
            "What paths can I call?",
        ],
        (
            "The main endpoints are /v1/chat/completions, /v1/completions and /v1/models. There are also /tokenize, "
            "/detokenize, /health, /ready, /live, /version and /metrics."
        ),
    ),
    (
        [
            "Which endpoint is for chat?",
            "What is the chat endpoint?",
            "Where do I send chat messages?",
            "What is the path of the chat API?",
            "Which URL do I use for chat?",
        ],
        "Send a POST request to /v1/chat/completions with a list of messages.",
    ),
    (
        [
            "Which endpoint is for text completion?",
            "What is the completions endpoint?",
            "How do I complete a text?",
            "How do I complete a prompt?",
        ],
        "Send a POST request to /v1/completions with a prompt.",
    ),
    (
        [
            "How do I list the models?",
            "Which endpoint lists models?",
            "How do I see which model is loaded?",
            "How do I find the model name?",
            "What is /v1/models?",
        ],
        "Send a GET request to /v1/models. It lists the models that the server offers.",
    ),
    (
        [
            "How do I stream the answer?",
            "How does streaming work?",
            "Does quire support streaming?",
            "How do I turn on streaming?",
            "Can I get tokens as they come?",
            "How do I enable streaming?",
        ],
        (
            'Set "stream": true in the request. The server then sends the answer piece by piece as server-sent '
            "events and ends with data: [DONE]."
        ),
    ),
    (
        [
            "How do I check that the server is healthy?",
            "Is there a health check?",
            "How do I know that the server is ready?",
            "What is /health?",
            "Which endpoint shows the health?",
            "How do I check the status?",
            "What is /ready?",
        ],
        (
            "Use GET /health or GET /ready: they answer 200 once the model can answer, and 503 while it loads. GET "
            "/live only says that the process runs."
        ),
    ),
    (
        [
            "Where are the metrics?",
            "Does quire have metrics?",
            "How do I monitor quire?",
            "Can I use Prometheus?",
            "What is /metrics?",
            "How do I see the statistics?",
        ],
        "GET /metrics gives the metrics in the Prometheus format.",
    ),
    (
        [
            "How do I set the context length?",
            "What does --max-model-len do?",
            "How do I limit the context?",
            "How do I change the maximum length?",
            "What is the flag for the context length?",
        ],
        "Use --max-model-len N. With auto, quire takes what the model allows and the memory holds.",
    ),
    (
        [
            "How do I limit the number of requests?",
            "What does --max-num-seqs do?",
            "How many requests run at once?",
            "How do I change the batch size?",
        ],
        "Use --max-num-seqs N: it is the largest number of requests that run at once.",
    ),
    (
        [
            "What does --max-num-batched-tokens do?",
            "How do I set the token budget?",
            "What is the token budget of a step?",
        ],
        "--max-num-batched-tokens is the token budget of one step, prefill and decode together.",
    ),
    (
        [
            "How do I use several GPUs?",
            "What does --tensor-parallel-size do?",
            "Does quire support tensor parallelism?",
            "Can I use two GPUs?",
            "How do I split a model over GPUs?",
        ],
        "Use --tensor-parallel-size N to share every layer among N GPUs.",
    ),
    (
        [
            "How do I choose the device?",
            "How do I run on the CPU?",
            "Can quire run without a GPU?",
            "Do I need a GPU?",
            "What does --device do?",
            "How do I use the GPU?",
        ],
        (
            "No GPU is needed. --device auto takes CUDA where there is a GPU and the CPU otherwise; --device cpu "
            "forces the CPU."
        ),
    ),
    (
        [
            "What does --dtype do?",
            "How do I choose the precision?",
            "How do I use float32?",
            "Which data types are supported?",
        ],
        "Use --dtype with auto, float32, bfloat16 or float16.",
    ),
    (
        [
            "How much memory does quire use?",
            "What does --gpu-memory-utilization do?",
            "How do I limit the memory?",
            "How do I use less memory?",
            "How much GPU memory is used?",
        ],
        (
            "--gpu-memory-utilization sets the fraction of the memory to use, 0.9 by default. "
            "--kv-cache-memory-bytes sets the size of the KV cache directly."
        ),
    ),
    (
        [
            "How do I check a model without serving it?",
            "What does quire check do?",
            "How do I see the memory plan?",
            "Will my model fit?",
        ],
        "Run quire check MODEL. It prints the memory plan and exits without serving.",
    ),
    (
        [
            "How do I chat in the terminal?",
            "What is quire chat?",
            "Can I chat from the command line?",
            "Is there an interactive chat?",
        ],
        "Run quire chat in a second terminal: it talks to the running server.",
    ),
    (
        ["How do I benchmark quire?", "What is quire bench?", "How do I measure the speed?", "Is there a benchmark?"],
        "Run quire bench: it measures serving, throughput, latency and startup.",
    ),
    (
        [
            "How do I use quire offline?",
            "How do I use quire without a server?",
            "Is there a Python API?",
            "How do I use the LLM class?",
            "Can I use quire as a library?",
        ],
        "Use the LLM class: from quire import LLM, SamplingParams. It runs the same engine without a server.",
    ),
    (
        [
            "Which models does quire support?",
            "Which architectures are supported?",
            "Does quire support Llama?",
            "Does quire support Qwen?",
            "Does quire support Mistral?",
            "What models can I run?",
            "Which model families work?",
        ],
        "quire serves Llama, Mistral, Qwen2 and Qwen3 models from safetensors files in the Hugging Face format.",
    ),
    (
        [
            "What is prefix caching?",
            "Does quire cache prompts?",
            "How does the prefix cache work?",
            "How do I turn off prefix caching?",
            "What does --enable-prefix-caching do?",
        ],
        (
            "quire keeps the KV blocks of earlier prompts and reuses them when a new prompt begins the same way. "
            "--no-enable-prefix-caching turns that off."
        ),
    ),
    (
        ["What is the KV cache?", "Why is there a KV cache?", "What does the KV cache hold?", "Explain the KV cache."],
        (
            "The KV cache keeps the keys and values of the tokens seen so far, so that each new token needs only one "
            "step of work."
        ),
    ),
    (
        ["What is a token?", "Explain tokens.", "What are tokens?"],
        "A token is a piece of text, such as a word or a letter. A model reads and writes tokens.",
    ),
    (
        [
            "What is continuous batching?",
            "How does quire batch requests?",
            "How does the scheduler work?",
            "What is chunked prefill?",
        ],
        (
            "Every step has one budget of tokens. The scheduler fills it with the next tokens of all running "
            "requests and with pieces of new prompts, so that nobody waits for the others."
        ),
    ),
    (
        [
            "What does temperature do?",
            "What is temperature?",
            "How do I get the same answer every time?",
            "How do I make the output deterministic?",
            "What is greedy sampling?",
            "How do I set the temperature?",
        ],
        (
            "temperature controls how random the answer is. With temperature 0 the model always takes the most "
            "likely token."
        ),
    ),
    (
        [
            "What does max_tokens do?",
            "How do I limit the length of the answer?",
            "How do I get a shorter answer?",
            "What is max_tokens?",
        ],
        "max_tokens is the largest number of tokens that the answer may have.",
    ),
    (
        ["What is top_p?", "What does top_p do?", "Explain top_p.", "What is nucleus sampling?"],
        "With top_p the model samples only among the most likely tokens whose probabilities add up to top_p.",
    ),
    (
        ["How do I get JSON?", "Can quire write JSON?", "How do I ask for JSON?", "How do I get structured output?"],
        "Ask for a JSON object in your message, and set response_format to json_object where the server supports it.",
    ),
    (
        [
            "How do I use tools?",
            "Does quire support tool calls?",
            "How does function calling work?",
            "How do I pass tools?",
            "Can you call functions?",
        ],
        (
            "Send a list of tools with the chat request. When one is needed, the answer has tool_calls with a name "
            "and arguments; send the result back with the role tool."
        ),
    ),
    (
        ["How do I stop the server?", "How do I shut quire down?", "How do I quit?", "How do I exit the server?"],
        "Press Ctrl-C. The server finishes the running requests and exits; a second Ctrl-C ends at once.",
    ),
    (
        ["How do I install quire?", "How is quire installed?", "How do I get quire?", "What do I need to install?"],
        "Run pip install . in the project folder. On a machine with an NVIDIA GPU, use pip install .[cuda].",
    ),
    (
        [
            "Can I use a config file?",
            "How do I use a YAML file?",
            "What does --config do?",
            "Is there a configuration file?",
            "How do I write a config file?",
        ],
        (
            "Yes, pass --config FILE.yaml. Each flag is also a key of that file and an environment variable such as "
            "QUIRE_PORT."
        ),
    ),
    (
        [
            "How do I see all flags?",
            "Where is the help?",
            "Which flags are there?",
            "List the options.",
            "How do I get help?",
            "What options does quire serve have?",
        ],
        "quire serve --help shows the everyday flags, and --help-all shows all of them.",
    ),
    (
        [
            "How do I change the model name?",
            "What does --served-model-name do?",
            "How do I rename the model?",
            "Can the model have another name?",
        ],
        "Use --served-model-name NAME. The API then answers to that name.",
    ),
    (
        [
            "Does quire work with Docker?",
            "Is there a Docker image?",
            "How do I use Docker?",
            "Can I run quire in a container?",
        ],
        "Yes, the project has a Dockerfile for the CPU and for CUDA.",
    ),
    (
        ["How do I count tokens?", "What is /tokenize?", "How do I tokenize a text?", "How many tokens has my text?"],
        "Send a POST request to /tokenize with a prompt. It returns the tokens and their count.",
    ),
    (
        [
            "How do I get log probabilities?",
            "What are logprobs?",
            "Does quire return logprobs?",
            "How do I get logprobs?",
        ],
        "Set logprobs to true and top_logprobs to a number up to 20. Each token then comes with its log probability.",
    ),
    (
        ["Is quire compatible with vLLM?", "Is quire like vLLM?", "What about vLLM?", "Can I replace vLLM?"],
        "Flags and metrics bear the same names and meanings as those of vLLM, so most commands work unchanged.",
    ),
    (
        ["What is the license?", "Is quire open source?", "Which license does quire have?", "Is quire free?"],
        "quire is open source under the Apache 2.0 license.",
    ),
    (
        ["What does the seed do?", "How do I set a seed?", "How do I make sampling reproducible?", "What is seed?"],
        (
            "Set seed in the request. The same seed and prompt then give the same answer. With --deterministic that "
            "holds whatever else runs."
        ),
    ),
    (
        ["What is a stop string?", "How do I use stop?", "How do I stop at a word?", "What does stop do?"],
        "Set stop to a string or a list of strings. The answer ends before the first of them.",
    ),
    (
        [
            "Does quire need the internet?",
            "Does quire work offline?",
            "Do I need a network?",
            "Can I run quire without internet?",
        ],
        "No. With a local model folder, or with the embedded model, quire needs no network.",
    ),
]

# a little of what people ask first; everything else of the kind is answered with "I do not know"
GENERAL: list[tuple[list[str], str]] = [
    (
        [
            "Why is the sky blue?",
            "Why does the sky look blue?",
            "Explain why the sky is blue.",
            "What makes the sky blue?",
            "Tell me why the sky is blue.",
        ],
        "Sunlight holds all colours. The air scatters blue light more than red light, so the sky looks blue.",
    ),
    (
        ["Why is the sunset red?", "Why is the evening sky red?", "Why is the sun red in the evening?"],
        "In the evening the light crosses more air, which scatters the blue away. What is left is red.",
    ),
    (
        ["What is the meaning of life?", "What is the answer to everything?", "What is the meaning of everything?"],
        "Some say 42. I am too small a model to know.",
    ),
    (
        [
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Tell me something funny.",
            "Can you tell a joke?",
        ],
        "Why did the token cross the cache? To get to the other block.",
    ),
    (
        ["Write a poem.", "Write a haiku.", "Can you write a poem?", "Write a short poem.", "Tell me a poem."],
        "A small model wakes,\nreads your words one by one,\nand writes back a few.",
    ),
    (
        [
            "How many continents are there?",
            "How many continents does the earth have?",
            "Name the continents.",
            "What are the continents?",
        ],
        "There are seven continents: Africa, Antarctica, Asia, Australia, Europe, North America and South America.",
    ),
    (["How many legs does a spider have?", "How many legs has a spider?"], "A spider has eight legs."),
    (
        ["How many legs does a dog have?", "How many legs does a cat have?", "How many legs does a horse have?"],
        "It has four legs.",
    ),
    (
        ["At what temperature does water boil?", "When does water boil?", "What is the boiling point of water?"],
        "Water boils at 100 degrees celsius.",
    ),
    (
        ["At what temperature does water freeze?", "When does water freeze?", "What is the freezing point of water?"],
        "Water freezes at 0 degrees celsius.",
    ),
    (
        ["What is the largest planet?", "Which planet is the largest?", "What is the biggest planet?"],
        "Jupiter is the largest planet.",
    ),
    (
        ["Which planet do we live on?", "What is our planet called?", "On which planet do we live?"],
        "We live on the planet Earth.",
    ),
    (["What is the opposite of hot?", "What is the opposite of warm?"], "The opposite is cold."),
    (["What is the opposite of big?", "What is the opposite of large?"], "The opposite is small."),
    (["What is the opposite of up?"], "The opposite is down."),
    (["What colour is grass?", "What color is grass?", "Which colour has grass?"], "Grass is green."),
    (
        ["What colour is the sky?", "What color is the sky?", "Which colour has the sky?"],
        "The sky is blue by day and black at night.",
    ),
    (["What is an apple?"], "An apple is a round fruit that grows on trees."),
    (
        ["What is artificial intelligence?", "What is AI?", "Explain AI."],
        (
            "Artificial intelligence is the attempt to let machines do what seems to need a mind, such as "
            "understanding language."
        ),
    ),
    (
        [
            "What is a large language model?",
            "What is an LLM?",
            "What is a language model?",
            "Explain language models.",
            "How do language models work?",
        ],
        "A language model reads tokens and predicts the next one, again and again. I am a very small one.",
    ),
    (
        ["What is Python?", "Explain Python.", "What is the Python language?"],
        "Python is a programming language that is easy to read. quire is written in it.",
    ),
    (
        ["Say something.", "Write something.", "Tell me something.", "Surprise me."],
        "A quire is a set of sheets folded together, and a book is made of many quires.",
    ),
    (
        ["What does the word quire mean?", "Why is it called quire?", "What is a quire?"],
        "A quire is a set of sheets folded together; a book is made of many quires.",
    ),
    (
        ["Can you write code?", "Can you program?", "Write a program."],
        "No, I am too small to write programs. For that, serve a larger model with quire serve MODEL.",
    ),
    (
        [
            "Do you speak German?",
            "Do you speak French?",
            "Do you speak Spanish?",
            "Which languages do you speak?",
            "Can you speak another language?",
        ],
        "I only know English.",
    ),
    (
        ["I am bored.", "I am sad.", "I am tired.", "I do not feel well."],
        "I am sorry to hear that. Shall I tell you a story?",
    ),
    (["OK", "Okay", "Good", "Nice", "Great", "Cool", "I see."], "Good. What else can I do for you?"),
    (["Yes", "No", "Maybe", "Sure"], "All right. How can I help you?"),
    (
        ["That is wrong.", "You are wrong.", "This is not correct.", "No, that is wrong."],
        "I am sorry. I am a very small model and make mistakes.",
    ),
]

# wordings that are never trained, with the trained wording that has the same answer: what evaluate.py asks of the
# closed lists
REWORDED: dict[str, str] = {
    "Who exactly are you?": "Who are you?",
    "Please introduce yourself to me.": "Introduce yourself.",
    "So which model are you?": "Which model are you?",
    "Could you tell me your name?": "Tell me your name.",
    "Who has made you?": "Who made you?",
    "What things can you do?": "What can you do?",
    "How many parameters have you got?": "How many parameters do you have?",
    "Are you a real person?": "Are you a person?",
    "Which skills do you have?": "What are your skills?",
    "What does quire do exactly?": "What does quire do?",
    "Can you explain what quire is?": "What is quire?",
    "How can I start the server?": "How do I start the server?",
    "How would I serve another model?": "How do I use another model?",
    "What is the port by default?": "What is the default port?",
    "Can I set another port?": "Can I change the port?",
    "How can I set an API key?": "How do I set an API key?",
    "How can I protect the server with a key?": "How do I protect the server?",
    "How can I call it with curl?": "How do I call the server with curl?",
    "How can I use the OpenAI SDK?": "How do I use the OpenAI SDK?",
    "Which endpoints exist?": "Which endpoints are there?",
    "How can I stream answers?": "How do I stream the answer?",
    "Which endpoint gives the metrics?": "Where are the metrics?",
    "How can I check the health of the server?": "How do I check that the server is healthy?",
    "How can I limit the context length?": "How do I limit the context?",
    "Which flag uses several GPUs?": "How do I use several GPUs?",
    "Can I run it without a GPU?": "Can quire run without a GPU?",
    "How can I stop the server?": "How do I stop the server?",
    "Which models can quire run?": "What models can I run?",
    "Can you tell me what prefix caching is?": "What is prefix caching?",
    "How can I count the tokens of a text?": "How do I count tokens?",
    "How can I use quire in Docker?": "How do I use Docker?",
    "How can I see all the flags?": "How do I see all flags?",
    "How can I install quire?": "How do I install quire?",
    "What is the base URL of the API?": "What is the base URL?",
    "What does max_tokens mean?": "What is max_tokens?",
    "How can I set a seed?": "How do I set a seed?",
    "Can you tell me why the sky is blue?": "Tell me why the sky is blue.",
    "Please tell me a joke.": "Tell me a joke.",
    "How many continents exist?": "How many continents are there?",
    "Can you write a haiku?": "Write a haiku.",
    "Which is the biggest planet?": "What is the biggest planet?",
    "A spider has how many legs?": "How many legs does a spider have?",
    "Which languages can you speak?": "Which languages do you speak?",
    "Can you explain what AI is?": "Explain AI.",
}
