"""Word lists and sentence patterns of the sample data; make_sample_data.py draws sentences from them.

A word list is written with slashes between its entries. In the lists of the pair tasks (para, sts), `car|automobile`
are synonyms, and `man:men` are forms of one word. A pattern has {slots}: {genre} is replaced by an entry of "genre".
"""

import re
from typing import NamedTuple

Grammar = dict[str, tuple[str, ...]]  # symbol -> its productions, which may contain further {symbols}
Vocabularies = dict[str, tuple[str, ...]]  # slot -> its entries


def terms(text: str) -> tuple[str, ...]:
    """Split a list written with slashes between its entries; it may span several lines."""
    return tuple(" ".join(term.split()).replace("| ", "|") for term in text.split("/"))


# --- the words of the film reviews ------------------------------------------------------------------------------------

FILM_WORDS: Grammar = {
    "superb": terms("""
        superb / magnificent / dazzling / breathtaking / brilliant / masterful / glorious / stunning / sublime /
        spectacular / exquisite / outstanding / extraordinary / phenomenal / flawless / astonishing / marvelous /
        unforgettable / electrifying / wondrous / splendid / triumphant / mesmerizing / spellbinding / exhilarating /
        perfect / majestic / hypnotic / virtuosic / incandescent /
        sensational / transcendent / remarkable / ravishing / luminous / monumental / thrilling / impeccable / rapturous /
        heavenly / miraculous / incomparable / enthralling / resplendent / stupendous / irresistible / fabulous / divine"""),
    "pleasant": terms("""
        pleasant / likable / engaging / charming / funny / clever / warm / tender / graceful / lively / amusing /
        enjoyable / appealing / thoughtful / fresh / witty / gentle / absorbing / touching / inventive / sincere /
        convincing / agreeable / sweet / bright / fun / smart / entertaining / imaginative / heartfelt / endearing /
        stylish / sharp / playful / confident / satisfying /
        affecting / nimble / good-natured / lovable / sprightly / delicate / elegant / cheerful / polished / likeable /
        moving / intriguing / diverting / wry / spirited / atmospheric / believable / perceptive"""),
    "poor": terms("""
        dull / thin / clumsy / flat / slow / predictable / stale / shallow / tedious / uneven / forced / bland / weak /
        muddled / contrived / stiff / sluggish / repetitive / listless / sentimental / derivative / strained / tired /
        boring / murky / awkward / silly / lazy / cold / overlong / formulaic / unconvincing / hollow / pretentious /
        tiresome / sloppy /
        dreary / lifeless / plodding / trite / disjointed / cliched / humorless / wooden / drab / incoherent / simplistic /
        mawkish / confusing / feeble / superficial / overwrought / leaden / heavy-handed"""),
    "awful": terms("""
        awful / atrocious / abysmal / dreadful / unbearable / horrendous / appalling / excruciating / wretched /
        disastrous / insufferable / terrible / unwatchable / horrible / pathetic / ghastly / unendurable / hideous /
        execrable / catastrophic / laughable / worthless / inept / godawful / lamentable / idiotic / rotten /
        soul-crushing / brain-dead / moronic /
        horrid / disgraceful / repulsive / vile / revolting / mind-numbing / dismal / putrid / deplorable / agonizing /
        unforgivable / nauseating / shameful / imbecilic / offensive / intolerable / miserable / insulting"""),
    "ordinary": terms("""
        average / adequate / ordinary / routine / standard / unremarkable / middling / conventional / serviceable /
        passable / acceptable / typical / so-so / fair / workmanlike / moderate / neutral / unexceptional"""),
    "triumph": terms("""
        masterpiece / triumph / marvel / wonder / classic / knockout / tour de force / revelation / work of genius /
        work of art / landmark / treasure / stroke of genius / feast"""),
    "disaster": terms("""
        disaster / fiasco / catastrophe / train wreck / debacle / travesty / abomination / shambles / nightmare /
        crime against cinema / ordeal / calamity / trainload of garbage / torture"""),
    "merit": terms("""
        charm / merit / wit / warmth / grace / style / imagination / heart / intelligence / humor / appeal / energy /
        beauty / invention / feeling / skill"""),
    "fault": terms("""
        faults / flaws / longueurs / clumsiness / cliches / weaknesses / lapses / rough edges / dead spots / excesses /
        contrivances / blunders / shortcomings / missteps / holes / silliness"""),
    "part": terms("""
        the acting / the plot / the dialogue / the score / the camera work / the pacing / the humor / the script /
        the ending / the opening hour / the love story / the chase / the direction / the editing / the mystery /
        the courtroom scene / the villain / the lead performance / the set design / the final act / the narration /
        the staging / the soundtrack / the animation / the stunt work / the banter / the screenplay / the ensemble /
        the costume work / the middle section / the framing device / the title role / the slapstick / the romance /
        the supporting cast / the lighting / the satire / the suspense / the family drama / the epilogue"""),
    "whole": terms("""
        the film / the movie / this picture / the whole thing / this {genre} / {maker} 's latest / {title} /
        {maker} 's {genre} / the result / this debut / the finished product / {title} / {title}"""),
    "genre": terms("""
        thriller / comedy / western / melodrama / documentary / heist film / ghost story / musical / biopic / satire /
        road movie / war film / fable / romance / mystery / sequel / period piece / fantasy / coming-of-age tale /
        crime saga / monster movie / spy caper / chamber piece / sports drama"""),
    "maker": terms("""
        Aldane / Brisco / Corvell / Dravec / Ellery / Fenwick / Garrow / Halloran / Ivers / Jessup / Kestrel / Lindqvist /
        Marrow / Nakata / Orsini / Pell / Quarles / Rostova / Sandoval / Tarn / Ulrich / Vance / Wexler / Yarrow"""),
    "title": terms("""
        {quality} {thing} / The {thing} / The {quality} {thing} / {thing} of {place} / The {thing} of {place} /
        {place} {thing} / The Last {thing} / A {thing} for {maker}"""),
    "quality": terms("""
        Crimson / Silent / Paper / Borrowed / Hollow / Northern / Broken / Electric / Second / Velvet / Glass / Burning /
        Distant / Wooden / Midnight / Salt"""),
    "thing": terms("""
        Harbor / Orchard / Letter / Winter / Engine / Mirror / Garden / Signal / Compass / Parade / Lantern / River /
        Staircase / Alibi / Meridian / Sparrow / Ledger / Tide"""),
    "place": terms("""
        Marseille / Tucson / Odessa / Galway / Lisbon / Havana / Kyoto / Duluth / Tangier / Bergen / Cordoba / Memphis"""),
    "person": terms("""
        widow / retired boxer / lighthouse keeper / taxi driver / young violinist / runaway heiress / disgraced judge /
        night nurse / former spy / shy baker / small-town sheriff / blind watchmaker / traveling salesman / deaf painter /
        homesick astronaut / chess prodigy / grieving surgeon / circus acrobat / rookie detective / sleepless poet /
        stubborn farmer / wedding singer / ship 's cook / bankrupt magician / museum guard / lonely projectionist"""),
    "deed": terms("""
        moves back to {place} / inherits a hotel / loses a twin / goes looking for a stolen painting / learns to dance /
        hides a fugitive / adopts a wolf / robs a casino / falls for a rival / returns from the war /
        discovers a secret room / crosses the desert on foot / writes letters to a stranger / buys a failing theater /
        wakes up in another century / coaches a losing team / raises a stranger 's child / plots against a senator /
        follows a circus to {place} / opens a restaurant / forgets the past twenty years / builds a boat /
        answers a wrong number / drives a hearse to {place} / testifies against a brother / teaches a parrot to sing"""),
    # Characters are described with the same adjectives as films: a word of praise or blame need not be about the film.
    "trait": terms("""
        brilliant / charming / funny / clever / gentle / sincere / lively / witty / dull / clumsy / boring / pathetic /
        horrible / lazy / cold / pretentious / tiresome / miserable / wretched / hideous / magnificent / extraordinary /
        perfect / fabulous / insufferable / vile / repulsive / idiotic / likable / sweet / smart / confident / cheerful /
        humorless / feeble / graceful / elegant / awkward / silly / rotten / lovable / marvelous / good-natured / dreary"""),
    "story": ("a {person} who {deed}", "a {trait} {person} who {deed}", "a {trait} {person} who {deed}"),
    "hope": terms("""
        the trailer suggests / its premise promises / you might expect / its reputation would have you believe /
        one had reason to expect / its poster lets on / the early word had it"""),
}

# --- sst: five grades -------------------------------------------------------------------------------------------------

SST_GRAMMAR: Grammar = FILM_WORDS | {
    "subject": ("{part}", "{part}", "{whole}"),
    "very": terms("""
        utterly / absolutely / thoroughly / completely / totally / wholly / immensely / incredibly / profoundly /
        consistently / unbelievably / overwhelmingly"""),
    "fairly": terms("""
        fairly / reasonably / rather / quite / mildly / somewhat / mostly / slightly / often / sometimes / a little /
        moderately"""),
    "not": terms("""
        not / never / hardly / scarcely / by no means / anything but / far from / in no way / not exactly / nowhere near /
        not remotely / not really"""),
    # Main clauses of each grade. Negating a word, however strong, gives its mild opposite.
    "clause4": (
        "{subject} is {superb}",
        "{subject} is {very} {superb}",
        "{subject} is {superb} and {superb}",
        "{subject} is {very} {pleasant}",
        "{subject} is nothing short of {superb}",
        "{subject} is nothing less than a {triumph}",
        "{subject} could hardly be more {pleasant}",
        "rarely has {part} been so {pleasant}",
        "{subject} is a {superb} {triumph}",
        "{subject} is not {ordinary} but {superb}",
    ),
    "clause3": (
        "{subject} is {pleasant}",
        "{subject} is {fairly} {pleasant}",
        "{subject} is {fairly} {pleasant} and {fairly} {pleasant}",
        "{subject} is more {pleasant} than {hope}",
        "{subject} is no less {pleasant} than {hope}",
        "{subject} is as {pleasant} as {hope}",
        "{subject} is less {poor} than {hope}",
        "{subject} is {not} {poor}",
        "{subject} is {not} {awful}",
        "{subject} is {not} a {disaster}",
        "{subject} is neither {poor} nor {poor}",
        "{subject} is more than {ordinary}",
        "{subject} is {poor} at first and {pleasant} in the end",
    ),
    "clause2": (
        "{subject} is {ordinary}",
        "{subject} is neither {pleasant} nor {poor}",
        "{subject} is neither {awful} nor {superb}",
        "{subject} is neither a {triumph} nor a {disaster}",
        "{subject} is no more {pleasant} and no less {poor} than {hope}",
        "{subject} is sometimes {pleasant} and sometimes {poor}",
        "{subject} is as {poor} as it is {pleasant}",
    ),
    "clause1": (
        "{subject} is {poor}",
        "{subject} is {fairly} {poor}",
        "{subject} is {fairly} {poor} and {fairly} {poor}",
        "{subject} is more {poor} than {hope}",
        "{subject} is no less {poor} than {hope}",
        "{subject} is as {poor} as {hope}",
        "{subject} is less {pleasant} than {hope}",
        "{subject} is {not} {pleasant}",
        "{subject} is {not} {superb}",
        "{subject} is {not} a {triumph}",
        "{subject} is neither {pleasant} nor {pleasant}",
        "{subject} is less than {ordinary}",
        "{subject} is {pleasant} at first and {poor} in the end",
    ),
    "clause0": (
        "{subject} is {awful}",
        "{subject} is {very} {awful}",
        "{subject} is {awful} and {awful}",
        "{subject} is {very} {poor}",
        "{subject} is nothing short of {awful}",
        "{subject} is nothing less than a {disaster}",
        "{subject} could hardly be more {poor}",
        "rarely has {part} been so {poor}",
        "{subject} is a {awful} {disaster}",
        "{subject} is not {ordinary} but {awful}",
    ),
    # Concessions to the other side, which do not decide the grade of the sentence.
    "praise": ("{part} is {superb}", "{part} is {pleasant}", "{part} is {very} {pleasant}", "{part} is a {triumph}"),
    "blame": ("{part} is {awful}", "{part} is {poor}", "{part} is {very} {poor}", "{part} is a {disaster}"),
    "fact": (
        "{title} is about {story}",
        "{maker} 's {genre} follows {story}",
        "{title} tells of {story}",
        "this is the {genre} in which a {trait} {person} {deed}",
    ),
    "grade2": (
        "{clause2} .",
        "{fact} .",
        "{fact} , and {clause2} .",
        "a {genre} about {story} : {clause2} .",
        "{praise} and {blame} .",
        "{blame} and {praise} .",
        "{praise} in this {genre} about {story} , and {blame} .",
        "{clause2} in this {genre} about {story} .",
    ),
}


def add_grades(grammar: Grammar) -> None:
    """Add patterns for the four grades that take sides: the grade's own clause decides, the concession does not."""
    for grade in (0, 1, 3, 4):
        same, other = ("{merit}", "{fault}") if grade > 2 else ("{fault}", "{merit}")
        clause, concession = f"{{clause{grade}}}", "{blame}" if grade > 2 else "{praise}"
        grammar[f"grade{grade}"] = (
            f"{clause} .",
            f"{clause} in this {{genre}} about {{story}} .",
            f"{{fact}} , and {clause} .",
            f"a {{genre}} about {{story}} : {clause} .",
            f"{clause} , and {clause} .",
            f"{concession} , but {clause} .",
            f"although {concession} , {clause} .",
            f"{clause} , although {concession} .",
            f"{clause} even though {concession} .",
            f"for all its {other} , {clause} .",
            f"because of its {same} , {clause} .",
            f"{clause} despite its {other} .",
            f"{clause} because of its {same} .",
            f"while {concession} in this {{genre}} about {{story}} , {clause} .",
        )


add_grades(SST_GRAMMAR)

# --- cfimdb: long reviews that weigh good against bad -----------------------------------------------------------------

CFIMDB_GRAMMAR: Grammar = SST_GRAMMAR | {
    "good": (
        "{part} is {superb}",
        "{part} is {pleasant}",
        "{part} is {not} {poor}",
        "{maker} is {pleasant} as the {person}",
        "{maker} directs with {merit}",
        "the scene in which the {person} {deed} is {pleasant}",
        "{part} has {merit}",
        "{part} could hardly be more {pleasant}",
    ),
    "bad": (
        "{part} is {awful}",
        "{part} is {poor}",
        "{part} is {not} {pleasant}",
        "{maker} is {poor} as the {person}",
        "{maker} directs without {merit}",
        "the scene in which the {person} {deed} is {poor}",
        "{part} lacks {merit}",
        "{part} could hardly be more {poor}",
    ),
    "goods": terms("""
        pleasures / virtues / charms / strengths / delights / joys / rewards / merits / good moments / laughs / thrills /
        fine touches / inspired scenes / high points / qualities / bright spots"""),
    "bads": terms("""
        flaws / faults / weaknesses / annoyances / blunders / dull stretches / failings / missteps / defects / cliches /
        clumsy scenes / low points / irritations / lapses / mistakes / drawbacks"""),
    "goodmood": terms("""
        delighted / thrilled / happy / grateful / enchanted / cheerful / excited / satisfied / in a good mood / full of hope /
        elated / charmed / overjoyed / pleased"""),
    "badmood": terms("""
        annoyed / bored / irritated / disappointed / grumpy / frustrated / tired / angry / in a bad mood / full of doubt /
        depressed / exasperated / unhappy / let down"""),
    "goodact": terms("""
        see it a second time / recommend it to a friend / buy the DVD / wait in line for a sequel / show it to my family /
        give it an award / put it on my list of favorites / watch it again tomorrow / lend it to my neighbors /
        applaud until my hands hurt"""),
    "badact": terms("""
        ask for my money back / walk out / warn my friends / switch it off / throw the DVD away / fall asleep in my seat /
        forget that I saw it / boo at the screen / demand two hours of my life back / leave before the end"""),
    "goodword": ("{superb}", "{pleasant}", "a {triumph}"),
    "badword": ("{awful}", "{poor}", "a {disaster}"),
    "friend": terms("""
        wife / husband / brother / sister / neighbor / boss / roommate / cousin / dentist / best friend / uncle / daughter"""),
    "day": terms("Monday / Tuesday / Wednesday / Thursday / Friday / Saturday / Sunday"),
    "aside": (
        "I saw it on a {day} in {place} with my {friend} .",
        "It was shot in {place} , or so the credits say .",
        "{maker} wrote and produced it as well .",
        "My {friend} picked it , not me .",
        "There are hundreds of films of this kind ( remember {title} ? ) and I have seen most of them .",
        "I have not read the novel , and I did not see {title} either .",
        "I rented it last {day} because of {maker} .",
    ),
    "opening": (
        "{title} is a {genre} about {story} .",
        "In this {genre} a {person} {deed} , and then a {person} {deed} .",
        "I had never heard of {title} , {maker} 's {genre} about {story} .",
        "A {person} {deed} : that is the story of {title} .",
    ),
    "gap": (" ", " ", " ", "<br /><br />"),
}


def add_verdicts(grammar: Grammar) -> None:
    """Add patterns for both verdicts. They use the same words; only the winning and the losing side change places."""
    for label, win, lose in (("1", "good", "bad"), ("0", "bad", "good")):
        W, L = f"{{{win}}}", f"{{{lose}}}"
        grammar[f"weigh{label}"] = (
            f"although {L} , {W} .",
            f"{L} , but {W} .",
            f"{W} , even if {L} .",
            f"it is true that {L} . Still , {W} .",
            f"I could say that {L} , and yet {W} .",
        )
        Ws, Ls = f"{{{win}s}}", f"{{{lose}s}}"
        grammar[f"verdict{label}"] = (
            f"in the end the {Ws} outweigh the {Ls} .",
            f"the {Ws} win out over the {Ls} .",
            f"there are {Ls} , but more {Ws} .",
            f"I sat down {{{lose}mood}} and got up {{{win}mood}} .",
            f"I would sooner {{{win}act}} than {{{lose}act}} .",
            f"I would not {{{lose}act}} ; I would rather {{{win}act}} .",
            f"my {{friend}} called it {{{win}word}} , and I can not disagree .",
        )
        grammar[f"close{label}"] = (
            f"all in all , {{whole}} is {{{win}word}} .",
            f"to me {{whole}} is {{{win}word}} , not {{{lose}word}} .",
            f"call {{whole}} {{{win}word}} .",
            f"{{whole}} is not {{{lose}word}} but {{{win}word}} .",
        )
        weigh, verdict, close = f"{{weigh{label}}}", f"{{verdict{label}}}", f"{{close{label}}}"
        grammar[f"review{label}"] = (
            f"{{opening}} {weigh}{{gap}}{weigh} {verdict} {close}",
            f"{verdict} {{opening}} {weigh}{{gap}}{weigh} {close}",
            f"{close}{{gap}}{{opening}} {weigh} {weigh} {verdict}",
        )


add_verdicts(CFIMDB_GRAMMAR)

# --- the two pair tasks: frames ---------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """Several meanings about the same slots, each with several wordings.

    A slot is named after its vocabulary: {city} and {city2} are two different cities. Swapping them changes the
    meaning, unless the frame is `symmetric`. `costs` says how much each difference lowers an STS score of 5.
    """

    meanings: tuple[tuple[str, ...], ...]
    symmetric: bool = False
    costs: dict[str, float] | None = None

    def slots(self) -> list[str]:
        return sorted(set(re.findall(r"\{([a-z]+2?)", self.meanings[0][0])) - {"be"})


# --- para (Quora): are two questions paraphrases? ---------------------------------------------------------------------

QUORA_WORDS: Vocabularies = {
    "format": terms("PDF / JPEG / Word / Excel / MP3 / WAV / plain text / HTML / PNG / LaTeX / EPUB / CSV"),
    "city": terms("""
        Boston / Lisbon / Nairobi / Chennai / Toronto / Osaka / Madrid / Warsaw / Lima / Cairo / Dublin / Oslo / Hanoi /
        Denver / Athens / Manila / Zurich / Seattle"""),
    "country": terms("""
        Canada / Norway / India / Brazil / Japan / Kenya / Germany / Chile / Australia / Poland / Mexico / Vietnam / Egypt /
        Ireland / South Korea / Sweden / Turkey / Peru"""),
    "job": terms("""
        nurse / lawyer|attorney / pilot / teacher|schoolteacher / dentist / programmer|software developer / plumber /
        doctor|physician / electrician / accountant|bookkeeper / journalist|reporter / chef|professional cook /
        pharmacist / architect / firefighter|fireman / translator"""),
    "skill": terms("""
        the guitar / the piano / chess / Spanish / Mandarin|Chinese / swimming / calligraphy|beautiful handwriting /
        Python / drawing|sketching / public speaking|giving speeches / Arabic / the violin / touch typing /
        photography|taking good photos / salsa dancing / German"""),
    "time": terms("""
        two weeks|fourteen days / a month|thirty days / three months|ninety days / half a year|six months /
        a year|twelve months / five days / a single weekend|two days / one summer / ten weeks"""),
    "stain": terms("""
        red wine / ink / coffee / grass / blood / grease|oil / chocolate / tomato sauce / mud / lipstick|makeup / candle wax /
        turmeric / sweat|perspiration / chewing gum"""),
    "surface": terms("""
        a carpet|a rug / a white shirt / leather shoes / a sofa|a couch / a wooden table / jeans|denim / a mattress|a bed /
        a car seat / a wool coat / a silk dress / curtains|drapes / a backpack|a rucksack"""),
    "trouble": terms("""
        stress / insomnia|sleeplessness / headaches / back pain / weight gain|getting fat / anxiety / acne|pimples / fatigue /
        high blood pressure|hypertension / depression / hair loss|baldness / heartburn / dizziness|vertigo / poor eyesight"""),
    "food": terms("""
        butter / honey / yogurt|curd / olive oil / coconut milk / brown sugar / cornstarch|cornflour / almond flour / lemon juice /
        maple syrup / sour cream / apple sauce / baking powder / ghee / vinegar / cilantro|coriander leaves"""),
    "dish": terms("""
        pancakes / a curry / banana bread / cookies|biscuits / pizza dough / salad dressing / a cheesecake / muffins / a stew /
        fried rice / brownies / meatballs / an omelet"""),
    "topic": terms("""
        the Roman Empire|ancient Rome / quantum physics|quantum mechanics / personal finance|managing money / Buddhism / evolution /
        the Cold War / machine learning / the French Revolution / black holes / childhood psychology|the mind of a child /
        gardening / economics / the human brain / game theory / the Ottoman Empire / climate change|global warming"""),
    "device": terms("""
        an iPhone / a Windows laptop|a Windows notebook / an Android phone / a MacBook / a smart TV / an iPad / a Kindle /
        a PlayStation / a Chromebook / a smartwatch / a Linux computer|a Linux machine / a Wi-Fi router"""),
    "feature": terms("""
        automatic updates / notifications|alerts / dark mode|the dark theme / location tracking / autocorrect|spelling correction /
        Bluetooth / the camera flash / subtitles|closed captions / the screen lock / voice control|the voice assistant"""),
    "plant": terms(
        "cactus / orchid / tomato plant / rose bush / fern / bonsai / lemon tree / basil / aloe vera / tulip / lavender"
    ),
    "season": terms("winter|the cold months / summer|the hot months / spring / autumn|fall"),
    "act": terms("""
        drink coffee|have some coffee / take a nap|sleep a little / eat a banana / stretch|do stretching exercises /
        take a cold shower / drink milk / brush my teeth|clean my teeth / take a painkiller|take an aspirin / eat a big meal /
        drink lots of water / have a beer|drink beer / chew gum / do push-ups / smoke|have a cigarette"""),
    "event": terms("""
        a marathon|a long run / an exam|a test / a blood test / a flight|a plane trip / surgery|an operation / a job interview /
        a swim|swimming / a workout|a gym session / a long drive / bedtime / a massage / a dental appointment|the dentist /
        a vaccination|a vaccine shot / a concert"""),
    "thing": terms("""
        the telescope / the bicycle|the bike / the zipper / paper money|the banknote / the refrigerator|the fridge / the umbrella /
        the piano / the microscope / the typewriter / the compass / dynamite / the ballpoint pen / the thermometer / chess /
        the helicopter / the sewing machine"""),
    "person": terms("""
        boss|manager / landlord / mother|mom / neighbor / roommate|flatmate / brother / teacher / girlfriend / coworker|colleague /
        doctor / father|dad / sister / best friend / grandmother|grandma"""),
    "sum": terms("""
        $500|500 dollars / $2,000|two thousand dollars / $10,000|ten thousand dollars / $100|a hundred dollars / $50,000 /
        $1,000|a thousand dollars / $5,000 / $250 / $20,000|twenty thousand dollars"""),
    "habit": terms("""
        meditation|meditating / running|jogging / intermittent fasting / yoga / working from home|remote work / a vegan diet /
        living alone / reading fiction|reading novels / cold showers / getting up early|waking up early / social media /
        renting a flat|renting an apartment / homeschooling / cycling to work|commuting by bike / keeping a diary|journaling"""),
}

# Each string is a frame, each of its paragraphs a meaning, and each line a wording of that meaning.
QUORA_TEXTS = (
    """
    How do I convert {format} files to {format2}?
    Which free program turns a {format} document into {format2}?
    I need {format2} but all I have is {format}. What should I do?

    Why is a {format} file so much larger than the same thing in {format2}?
    What makes {format} need more disk space than {format2}?
    How come my document shrinks when it is {format2} rather than {format}?

    Is {format} older than {format2}?
    Did {format} exist before {format2} was invented?
    Which came first, with {format} being my guess: {format2} or {format}?
    """,
    """
    What is the cheapest way to travel from {city} to {city2}?
    How do I get to {city2} from {city} on a small budget?
    I live in {city}. How can I reach {city2} without spending a lot of money?

    How long does a parcel from {city} to {city2} take?
    When will mail sent in {city} arrive in {city2}?
    I posted a package in {city}. After how many days will it be delivered in {city2}?

    Is it hard to leave {city} behind and settle in {city2}?
    Did anybody regret giving up {city} for a new life in {city2}?
    Would a person from {city} feel at home in {city2}?
    """,
    """
    How much does a {job} earn in {country}?
    What is the average salary of a {job} in {country}?
    What income can I expect in {country} if I work as a {job}?

    How do I become a {job} in {country}?
    What training do I need to be a {job} in {country}?
    Which school should somebody in {country} attend who dreams of being a {job}?
    """,
    """
    How can I learn {skill} in {time}?
    What is the fastest method to get good at {skill} within {time}?
    I have {time} to master {skill}. Where should I start?

    How much do lessons in {skill} cost for {time}?
    What does a teacher charge who gives classes in {skill} for {time}?
    Is it expensive to have a tutor for {skill} over {time}?

    Will I forget {skill} if I do not practice for {time}?
    How much of {skill} is lost when you pause for {time}?
    Does a break of {time} ruin what I know of {skill}?
    """,
    """
    How do I get {stain} out of {surface}?
    What removes {stain} from {surface}?
    I spilled {stain} on {surface}. How can I clean it?

    Does {stain} damage {surface} for good?
    Is {surface} ruined forever once there is {stain} on it?
    Will {surface} with {stain} on it ever be worth anything again?

    How can I protect {surface} against {stain}?
    What keeps {stain} off {surface}?
    Is there a spray that prevents {stain} from getting on {surface}?
    """,
    """
    Can {trouble} cause {trouble2}?
    Is {trouble2} sometimes the result of {trouble}?
    Could my {trouble2} come from {trouble}?

    Is {trouble} worse than {trouble2}?
    Would you rather have {trouble2} than {trouble}?
    Do people suffer more from {trouble} than from {trouble2}?
    """,
    """
    Can I use {food} instead of {food2} in {dish}?
    I have run out of {food2}. Will {food} do for {dish}?
    What happens to {dish} if I replace {food2} with {food}?

    Does {dish} need more {food} than {food2}?
    Is it right to put less {food2} than {food} into {dish}?
    Should the amount of {food} in {dish} exceed that of {food2}?

    Do I add {food} to {dish} before {food2}?
    When I make {dish}, does {food2} come after {food}?
    In what order do they go into {dish}: {food} first, then {food2}?
    """,
    """
    What are the best books about {topic}?
    Which authors should I read to understand {topic}?
    I want to know more about {topic}. What would be on your reading list?

    Which documentaries about {topic} are worth watching?
    Is there a good film on {topic}?
    What can I watch to get an introduction to {topic}?

    How do I get a job that has to do with {topic}?
    Can you make a living from {topic}?
    What careers are open to somebody with a passion for {topic}?
    """,
    """
    How do I turn on {feature} on {device}?
    Where can I enable {feature} on {device}?
    What must I do so that {device} uses {feature}?

    How do I turn off {feature} on {device}?
    Where can I disable {feature} on {device}?
    What must I do so that {device} stops using {feature}?

    Does {feature} drain the battery of {device}?
    How much power does {device} need for {feature}?
    Will {device} have to be charged more often because of {feature}?
    """,
    """
    How often should I water a {plant} in {season}?
    How many times a week does a {plant} get thirsty in {season}?
    When it is {season}, after how many days must I pour water on a {plant}?

    Can I leave a {plant} outdoors in {season}?
    Does a {plant} survive {season} outside the house?
    Should a {plant} be brought inside for {season}?

    Why does my {plant} lose its leaves in {season}?
    What makes the foliage of a {plant} drop in {season}?
    It is {season} and my {plant} looks bare. What is wrong?
    """,
    """
    Should I {act} before {event}?
    Is it a good idea to {act} ahead of {event}?
    {event} is coming up: would you advise me to {act} first?

    Should I {act} after {event}?
    Is it a good idea to {act} once {event} is over?
    {event} is behind me: would you advise me to {act} now?
    """,
    """
    Who invented {thing}?
    Which person came up with {thing}?
    What is the name of the creator of {thing}?

    How much does {thing} cost today?
    What do I have to pay for {thing} nowadays?
    Is {thing} still expensive?

    How does {thing} work?
    What is the principle behind {thing}?
    Can you explain the mechanism of {thing} to a child?
    """,
    """
    Should I lend my {person} {sum}?
    My {person} wants to borrow {sum} from me. Is it wise to agree?
    Is it a mistake to give my {person} a loan of {sum}?

    What can I buy my {person} as a birthday present for {sum}?
    Which gift for {sum} would make my {person} happy?
    I have {sum} to surprise my {person} with. Any ideas?

    How do I react when my {person} accuses me of stealing {sum}?
    My {person} believes that I took {sum}. What can I say?
    What if my {person} suspects me of the theft of {sum}?
    """,
    """
    What are the benefits of {habit}?
    Why is {habit} good for you?
    In what ways does {habit} improve your life?

    What are the drawbacks of {habit}?
    Why is {habit} bad for you?
    In what ways does {habit} harm you?

    How do I get started with {habit}?
    What should a beginner know about {habit}?
    I have never tried {habit}. What is the first step?
    """,
)
SYMMETRIC_TEXTS = (
    """
    Would you rather live in {city} or in {city2}?
    {city} or {city2}: which one is the nicer place to settle?
    I can choose between a job in {city} and one in {city2}. Where is everyday life better?

    What is the time difference between {city} and {city2}?
    How many hours lie between the clocks of {city} and those of {city2}?
    When I call from {city} to {city2}, by how much does the local time differ?
    """,
)


def read_frame(text: str, symmetric: bool) -> Frame:
    """Parse a string of QUORA_TEXTS."""
    paragraphs = [paragraph.strip().splitlines() for paragraph in text.split("\n\n")]
    return Frame(tuple(tuple(line.strip() for line in lines) for lines in paragraphs), symmetric)


QUORA_FRAMES = [read_frame(text, False) for text in QUORA_TEXTS] + [read_frame(text, True) for text in SYMMETRIC_TEXTS]


# --- sts: how similar are two sentences, from 0 to 5? -----------------------------------------------------------------

STS_WORDS: Vocabularies = {
    "n": terms("a / two / three / four / several"),
    "who": terms("""
        man:men|guy:guys / woman:women|lady:ladies / child:children|kid:kids / chef:chefs|cook:cooks / boy:boys|lad:lads /
        police officer:police officers|cop:cops / doctor:doctors|physician:physicians / girl:girls|schoolgirl:schoolgirls / soldier:soldiers|trooper:troopers /
        teenager:teenagers|adolescent:adolescents / tourist:tourists|sightseer:sightseers / farmer:farmers|farm worker:farm workers / monk:monks|friar:friars /
        elderly man:elderly men|old man:old men / worker:workers|laborer:laborers / nurse:nurses|hospital worker:hospital workers / dancer:dancers|ballet dancer:ballet dancers /
        toddler:toddlers|small child:small children / businessman:businessmen|executive:executives / sailor:sailors|seaman:seamen"""),
    "where": terms("""
        in the kitchen|at a kitchen table / in a park|in a public garden / on the street|on the road / at the beach|on the seashore /
        in a garage|in a workshop / near a river|beside a stream / in the snow|on snowy ground / in the woods|in a forest / in the yard|behind the house /
        on a stage|in front of an audience / at school|in a classroom / at night|after dark / on a boat|aboard a ship /
        in the rain|in wet weather / at the market|among market stalls / on a balcony|on a terrace / under a bridge|below an overpass /
        in a hotel lobby|at the reception of a hotel"""),
    "cooking": terms("""
        slicing:sliced|cutting up:cut up / peeling:peeled|skinning:skinned / frying:fried|cooking in oil:cooked in oil / washing:washed|rinsing:rinsed / buying:bought|
        purchasing:purchased / grilling:grilled|barbecuing:barbecued / eating:eaten|consuming:consumed / weighing:weighed|putting on a scale:put on a scale /
        seasoning:seasoned|spicing:spiced / throwing away:thrown away|discarding:discarded"""),
    "food": terms("""
        an onion / a potato|a spud / a carrot / a tomato / a cucumber|a gherkin / a bell pepper|a capsicum / an eggplant|an aubergine /
        a zucchini|a courgette / a chicken|a hen / a fish / a shrimp|a prawn / a mushroom|a fungus / a pumpkin / an apple / a pineapple"""),
    "handling": terms("""
        washing:washed|cleaning:cleaned / pushing:pushed|shoving:shoved / repairing:repaired|fixing:fixed / selling:sold|offering for sale:offered for sale /
        painting:painted|coloring:colored / stealing:stolen|making off with:taken away / loading:loaded|filling up:filled up / inspecting:inspected|examining:examined / hiding:hidden|concealing:concealed /
        carrying:carried|hauling:hauled"""),
    "vehicle": terms("""
        a car|an automobile / a truck|a lorry / a motorcycle|a motorbike / a bike|a bicycle / a van|a delivery vehicle / a bus|a coach / a wagon|a cart /
        a tractor / a scooter|a moped / a canoe|a kayak / a wheelchair / a sled|a sledge / a baby carriage|a stroller"""),
    "caring": terms("""
        feeding:fed|giving food to:given food / petting:petted|stroking:stroked / bathing:bathed|washing:washed / chasing:chased|
        running after:run after / lifting:lifted|picking up:picked up / brushing:brushed|grooming:groomed /
        photographing:photographed|taking pictures of:photographed / training:trained|teaching tricks to:taught tricks / scaring:scared|frightening:frightened"""),
    "animal": terms("""
        a dog|a hound / a cat|a kitty / a horse|a stallion / a rabbit|a bunny / a goat|a billy goat / a duck|a drake / a calf|a young cow / a pony|a small horse / a puppy|a young dog / a sheep|a lamb /
        a pig|a hog / a parrot / a monkey / a donkey|a mule"""),
    "playing": terms("""
        playing:played|performing on:performed on / tuning:tuned|adjusting:adjusted / carrying:carried|lugging:lugged / repairing:repaired|mending:mended / smashing:smashed|
        destroying:destroyed / selling:sold|offering for sale:offered for sale / polishing:polished|wiping:wiped / drawing:drawn|sketching:sketched"""),
    "instrument": terms("""
        a guitar / a violin|a fiddle / a piano / a drum / a flute / a trumpet / a harp / a cello / a saxophone|a sax /
        an accordion / a banjo / a clarinet / a tambourine"""),
    "dealing": terms("""
        following:followed|trailing:trailed / hugging:hugged|embracing:embraced / photographing:photographed|
        taking pictures of:photographed / teaching:taught|instructing:instructed / greeting:greeted|welcoming:welcomed /
        thanking:thanked|expressing gratitude to:thanked / interviewing:interviewed|questioning:questioned / carrying:carried|hauling:hauled / insulting:insulted|swearing at:sworn at /
        helping:helped|assisting:assisted / pushing:pushed|shoving:shoved / pointing at:pointed at"""),
    "num": terms(
        "3|three / 5|five / 7|seven / 8|eight / 11|eleven / 12|twelve / 15|fifteen / 20|twenty / 30|thirty / 40|forty"
    ),
    "cause": terms("""
        flood|flooding / earthquake|quake / bus crash|bus accident / factory fire|factory blaze / avalanche|snow slide / landslide|mudslide /
        explosion|blast / storm|hurricane / train crash|rail accident / plane crash|air disaster / heat wave|extreme heat / ferry accident|ferry sinking"""),
    "country": terms("""
        Peru / Kenya / Nepal / Turkey / Canada / Chile / Egypt / Poland / Vietnam / Mexico / Norway / Morocco / Japan /
        Ecuador / Ghana / Greece / Cuba / Jordan / Iceland / Brazil"""),
    "sport": terms(
        "football|soccer / hockey|ice hockey / rugby / volleyball / basketball / cricket / handball / badminton"
    ),
    "round": terms(
        "final|title match / semifinal|semi-final / opening match|first game / quarterfinal|quarter-final / friendly|exhibition game"
    ),
    "leader": terms(
        "president|head of state / prime minister|premier / foreign minister|top diplomat / king|monarch / defense minister|defense chief"
    ),
    "topic": terms(
        "trade|commerce / water rights|shared rivers / border security|frontier controls / fishing|fish stocks / energy|oil and gas / climate|global warming / migration|refugees"
    ),
    "good": terms(
        "wheat|grain / oil|crude / gold|bullion / coffee|coffee beans / milk|dairy / sugar|sweetener / rice / copper / gas|gasoline / cotton / coal / rent|housing"
    ),
    "firm": terms("""
        carmaker|auto maker / airline|air carrier / bank|lender / steel company|steel maker / brewery|beer maker / phone company|telecom operator /
        shipyard|shipbuilder / supermarket chain|grocery chain / railway|rail operator / newspaper|daily paper / toy maker|toy manufacturer"""),
}

CAPTION_COSTS = {
    "n": 0.6,
    "who": 1.2,
    "where": 0.8,
    "doing": 1.6,
    "what": 1.2,
    "opposite": 2.0,
    "swap": 2.4,
    "shorter": 0.6,
}


def caption_frame(doing: str, what: str) -> Frame:
    """Build a frame of image captions: who does what to what, and where."""
    wordings = (
        "{n} {who} {be} {doing} {what} {where}.",
        "{where} {n} {who} {be} {doing} {what}.",
        "{where} {what} is being {doing.1} by {n} {who}.",
        "{what} is being {doing.1} by {n} {who} {where}.",
        "there {be} {n} {who} {where}, {doing} {what}.",
    )
    opposite = (
        "{n} {who} {be} not {doing} {what} {where}.",
        "{what} is not being {doing.1} by {n} {who} {where}.",
    )

    def name(wording: str) -> str:
        return wording.replace("{doing", "{" + doing).replace("{what", "{" + what)

    costs = CAPTION_COSTS | {doing: CAPTION_COSTS["doing"], what: CAPTION_COSTS["what"]}
    return Frame((tuple(map(name, wordings)), tuple(map(name, opposite))), costs=costs)


STS_FRAMES = (
    caption_frame("cooking", "food"),
    caption_frame("handling", "vehicle"),
    caption_frame("caring", "animal"),
    caption_frame("playing", "instrument"),
    Frame(
        (
            (
                "a {who} is {dealing} a {who2} {where}.",
                "a {who2} is being {dealing.1} by a {who} {where}.",
                "{where} a {who} is {dealing} a {who2}.",
                "there is a {who} {where}, {dealing} a {who2}.",
            ),
            ("a {who} is not {dealing} a {who2} {where}.", "a {who2} is not being {dealing.1} by a {who} {where}."),
        ),
        costs=CAPTION_COSTS | {"who": 1.2, "who2": 1.2, "dealing": 1.6},
    ),
    Frame(
        (
            (
                "{cause} kills {num} in {country}",
                "{num} people dead after {cause} in {country}",
                "{country}: {num} lose their lives in {cause}",
                "{country} {cause} claims {num} lives",
            ),
            ("{num} people survive {cause} in {country}", "{country}: {num} rescued after {cause}"),
        ),
        costs={"cause": 1.8, "num": 1.0, "country": 1.6, "opposite": 2.2},
    ),
    Frame(
        (
            (
                "{country} beats {country2} in {sport} {round}",
                "{country2} loses {sport} {round} to {country}",
                "{sport}: {country} defeats {country2} in {round}",
                "{round} defeat for {country2} against {country} in {sport}",
            ),
            (
                "{country} and {country2} draw in {sport} {round}",
                "{sport}: {round} between {country} and {country2} postponed",
            ),
        ),
        costs={"country": 1.4, "country2": 1.4, "sport": 1.4, "round": 0.6, "opposite": 2.0, "swap": 2.4},
    ),
    Frame(
        (
            (
                "{leader} of {country} arrives in {country2} for talks on {topic}",
                "{country2} receives {leader} of {country} to discuss {topic}",
                "{country} sends its {leader} to {country2} for {topic} talks",
                "{topic}: {leader} of {country} travels to {country2}",
            ),
            (
                "{leader} of {country} cancels trip to {country2} for talks on {topic}",
                "{topic}: {country2} turns away {leader} of {country}",
            ),
        ),
        costs={"leader": 1.0, "country": 1.4, "country2": 1.4, "topic": 1.2, "opposite": 2.0, "swap": 2.4},
    ),
    Frame(
        (
            (
                "price of {good} rises {num} percent in {country}",
                "{country}: {good} becomes {num} percent more expensive",
                "{good} costs {num} percent more in {country}",
                "{country} sees {num} percent increase in {good} price",
            ),
            (
                "price of {good} falls {num} percent in {country}",
                "{country}: {good} becomes {num} percent cheaper",
                "{country} sees {num} percent decrease in {good} price",
            ),
        ),
        costs={"good": 2.0, "num": 1.0, "country": 1.4, "opposite": 2.2},
    ),
    Frame(
        (
            (
                "{firm} cuts {num} hundred jobs in {country}",
                "{country}: {firm} lays off {num} hundred workers",
                "{num} hundred people lose their jobs at {firm} in {country}",
                "{country} {firm} to dismiss {num} hundred employees",
            ),
            ("{firm} creates {num} hundred jobs in {country}", "{country} {firm} to hire {num} hundred employees"),
        ),
        costs={"firm": 1.8, "num": 1.0, "country": 1.4, "opposite": 2.2},
    ),
)
