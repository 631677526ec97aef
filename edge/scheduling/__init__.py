"""What do the peers of a plan compute next?"""
