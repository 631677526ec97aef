"""How are requests run over peers?"""
