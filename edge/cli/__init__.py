"""How is it used at a terminal?"""
