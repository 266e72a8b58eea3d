"""Word lists of the needle prompts: adjectives and nouns make the keys, the plain words make the noise haystack.

The three lists are disjoint, so a noise haystack never holds a word of a key.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
amber ancient arctic autumn azure bashful bitter blissful blunt bold brave breezy bright brisk bronze calm
candid careful cheerful chilly clever cloudy clumsy coastal copper cosmic cozy crimson crisp curious curly
dapper daring dazzling distant dusty eager early earnest elegant emerald faint faithful famous fancy fearless
fierce floral foggy fragile frosty frugal gallant gentle giddy gilded glad gleaming glossy golden graceful grand
grateful hardy hasty hazy hidden hollow humble hungry icy idle ivory jolly jovial keen kindly lazy lively lofty
lonely loyal lucky lunar mellow merry mighty misty modest mossy nimble noble oaken odd orange pale patient
playful polite proud purple quaint quick quiet rapid royal rugged rustic sacred scarlet shiny silent silver
sleepy slender smooth solar sturdy subtle sunny swift tidy tiny tranquil vivid wandering witty
""")

NOUNS = _words("""
acorn anchor antler apron arrow badger balcony banjo barley basket beacon beaver bicycle blanket blossom bonnet
bridge bucket button cabin cactus camel canoe canyon carpet castle cedar cello chapel cherry chimney cliff
clover cobbler comet compass coral cottage cricket crystal curtain daisy dolphin donkey dragon drum eagle easel
ember engine falcon feather fern ferry fiddle flute forge fountain fox garden gate gazelle glacier goblet guitar
hammer harbor harp hawk hazel helmet heron honey island ivy jacket jaguar jasmine kettle kite ladder lagoon
lantern lemon lighthouse lily lobster locket magnet mango maple marble meadow mirror mitten moose mountain nest
oasis orchard otter owl paddle panther parrot pebble pelican pepper piano pigeon pillow planet plum pocket pony
pumpkin quilt rabbit raven ribbon river robin rocket saddle salmon sparrow spoon
""")

PLAIN = _words("""
about above across action after again agree all almost along also always among and answer any around arrive ask
at away back be because become before begin below between both bring build but by call can carry change choose
city class clear close come common could country course cover cut day decide deep did different do down draw
drive each end enough even every example eye face fact family far feel few field figure find first floor follow
food for force form found friend from full game get give go good great group grow half hand happen hard have he
head hear help her here high him history hold home hope hour house how idea if important in inside into it just
keep kind know land large last late lead learn leave left less letter life line list little live long look made
main make many matter may mean measure might mind minute moment money more morning most move much must name near
need never new next night no north not note nothing notice now number of off often old on once one only open or
order other our out over own page paper part pass pattern people perhaps person picture piece place plain plan
point power present press problem produce public pull question read real reason record rest result right road
room round rule run same
""")
