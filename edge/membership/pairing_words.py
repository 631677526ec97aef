"""The word list of pairing codes: short, common words, none like another."""

_TEXT = """
acorn actor album alley amber angle ankle apple apron arrow atlas attic autumn bacon badge baker
balcony bamboo banana banjo barrel basket beach beard beaver bench berry bicycle bishop blanket
blossom bottle branch bread breeze bridge broom bucket butter button cabin cactus camel camera
candle canoe canyon carbon carpet carrot castle cattle cedar cello cement cherry chimney circus
clarinet clock cloud clover coast cobalt coffee comet compass copper coral cotton couch cousin
crayon cricket crystal curtain daisy dancer desert diamond dinner doctor dolphin donkey dragon
drawer eagle earth easel echo elbow elephant ember engine falcon farmer feather fence ferry
fiddle finger flute forest fossil fountain fox freezer frost galaxy garden garlic ginger giraffe
glacier globe goblet gorilla granite grape gravel guitar hammer harbor harp hazel hedge helmet
heron honey horizon hotel iceberg igloo island ivory jacket jaguar jasmine jelly jungle kayak
kernel kettle kitchen kitten ladder lagoon lantern laptop laundry lemon lettuce lizard lobster
locket lotus magnet mango maple marble market meadow melon mirror mitten monkey mosaic mountain
muffin museum mustard napkin needle nephew nickel nutmeg oasis ocean olive onion orange orchid
otter oven owl oyster paddle palace panda paper parrot pasta peach peanut pebble pelican pencil
pepper piano pigeon pillow pirate planet plaza pocket poem pony potato prairie puzzle quartz
quilt rabbit radio rain raven ribbon river robin rocket saddle salad salmon sandal scarf school
shadow shovel silver singer sleeve spider spoon squirrel stable statue summer sunset swan table
teapot temple thunder ticket tiger tomato trumpet tulip tunnel turtle umbrella valley velvet
village violin volcano
"""

WORDS = tuple(_TEXT.split())
"""256 words: each stands for a byte."""
