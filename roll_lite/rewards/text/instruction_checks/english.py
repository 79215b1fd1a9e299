from __future__ import annotations


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


CONJUNCTIONS = _listed("and but for nor or so yet")

PRONOUNS = _listed(
    """
    i me we us you he him she her it they them my mine our ours your yours his hers its their theirs
    myself ourselves yourself yourselves himself herself itself themselves
    """
)

STOP_WORDS = _listed(
    """
    a an the i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself
    they them their theirs themselves this that these those who whom which what am is are was were be been being have has had having
    do does did doing will should can just don now and but if or because as until while of at by for with about against between into
    through during before after above below to from up down in out on off over under again further then once here there when where why
    how all any both each few more most other some such no nor not only own same so than too very s t d ll m o re ve y
    ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn
    """
)

MINOR_WORDS = _listed("a an the and but or nor for so yet as at by in of off on per to up via with from into onto over if vs")

AUXILIARIES = _listed(
    """
    am is are was were be been being do does did done doing have has had having can could may might must shall should will would
    """
)

VERBS = _listed(
    """
    accept achieve act adapt add address adjust admire adopt advise agree aim allow analyze answer apply appreciate approach arrange arrive
    ask assemble assess assign assume attach attempt attend avoid bake balance ban be beat become begin believe bind bite blend block blow
    boil boost borrow break breathe bring build burn buy calculate call carry catch celebrate change charge chase check chew choose chop
    claim clap clean clear click climb close collect combine come compare compile complete compose compute concentrate conclude conduct
    confirm connect consider consist construct consult contact contain continue control convert convince cook cool copy correct cost count
    cover craft create cross cry cultivate cut dance deal debate decide declare decrease defend define delete deliver demonstrate deny
    depend describe deserve design destroy determine develop die differ dig disagree discover discuss display divide download draft drag
    draw dream dress drink drive drop dry dump earn eat edit educate embrace employ empower empty enable encounter encourage end engage
    enhance enjoy ensure enter escape establish estimate evaluate examine exchange exercise exist expand expect experience explain explore
    express extend extract face fail fall feed feel fetch fight fill filter find finish fit fix flip float flow fly focus fold follow
    forget forgive form fry gain gather generate get give glance go grab greet grind grow guess guide handle hang happen harvest hate heal
    hear heat help hide highlight hit hold hope hug hunt hurry identify ignore illustrate imagine implement improve include increase
    indicate influence inform insert insist install integrate intend introduce invent invest invite involve join judge jump justify keep
    kick kill know label laugh launch lay lead lean learn leave lend let lie lift limit link list listen live load locate lock look lose
    love lower maintain make manage mark match matter mean measure meet melt memorize mention mix model modify monitor mount move multiply
    navigate need note notice observe obtain occur offer open operate order organize outline overcome own pack paint park participate pass
    pay perform pick place plan plant play point pour practice praise pray predict prefer prepare present preserve press pretend prevent
    print prioritize proceed produce promise promote protect prove provide publish pull punch purchase push put question quit raise reach
    read realize recall receive recognize recommend record reduce refer reflect refuse regard regret reject relate relax release rely
    remain remember remind remove repair repeat replace reply report represent request require research reserve resolve respect respond
    rest restore result retain return reveal review revise ride ring rinse rise roast roll rub run sail save say scan schedule scrape
    scream search see seek seem select sell send separate serve set settle shake shape share shift shine ship shoot shop shout show shut
    sign simmer simplify sing sit sketch skip sleep slice slide slow smell smile soak solve sort sound speak specify spell spend spin
    split spread spring sprinkle squeeze stand start state stay steal step stick stir stop store stretch strike strive structure struggle
    study submit subtract succeed suffer suggest summarize supply support suppose surround survive suspect swap swim switch take talk
    taste teach tear tell tend test thank think throw tie toss touch trace track trade train transfer transform translate travel treat
    trim trust try turn type uncover understand unite update upgrade use utilize value verify view visit wait wake walk want warm warn
    wash waste watch wear weigh welcome whisk win wipe wish wonder work worry wrap write yell yield
    """
)

IRREGULAR = _listed(
    """
    ate became began blew bought broke brought built burnt came caught chose drank drew drove fed fell felt flew fought found gave gone got
    grew heard held hid kept knew known laid led left lent lost made meant met paid ran rang read rode rose said sang sat saw seen sent
    shook shot slept sold spent spoke stood stole struck swam taken taught told took tore thought threw understood went woke won wore
    written wrote
    """
)

NAMES = _listed(
    """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper Leo Zoe Daniel Chloe
    Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah
    Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
    """
)


def is_verb(word: str) -> bool:
    bases = [word]
    for ending in ("s", "es", "d", "ed", "ing"):
        if word.endswith(ending):
            stem = word[: -len(ending)]
            bases += [stem, stem + "e"]
            if stem[-1:] == stem[-2:-1]:
                bases.append(stem[:-1])  # stopped, running
            if stem.endswith("i"):
                bases.append(stem[:-1] + "y")  # tries, tried
    return word in AUXILIARIES or word in IRREGULAR or not VERBS.isdisjoint(bases)
