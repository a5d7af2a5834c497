"""Problems and games of other packages (extra `gym`): generated problems of reasoning-gym, games of textarena."""
