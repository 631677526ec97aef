"""What do coordinator and peer say to each other?"""
