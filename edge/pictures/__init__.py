"""How does a picture become tiles and tokens?

PictureReader     pictures of a conversation → tiles, and rows among its tokens  (reader.py)
tiling_of         a checkpoint's files → how it cuts pictures                    (settings.py)
SplitTiling, …    a picture → tiles, as each family cuts it                      (tiling.py)
PictureDecoder    bytes of a file → tiles, in a confined process                 (decoder.py)
"""
