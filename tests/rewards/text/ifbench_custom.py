"""IFBench's instructions custom:NAME, which ask for long forms; its others are in cases/ifbench.jsonl."""

from __future__ import annotations

COUNTRIES = """Zimbabwe, Zambia, Uganda, Tunisia, Togo, Tanzania, Sudan, South Sudan, South Africa, Somalia, Sierra Leone, Seychelles,
Senegal, São Tomé and Príncipe, Rwanda, Nigeria, Niger, Namibia, Mozambique, Morocco, Mauritius, Mauritania, Mali, Malawi, Madagascar,
Libya, Liberia, Lesotho, Kenya, Guinea-Bissau, Guinea, Ghana, Gabon, Eswatini, Eritrea, Equatorial Guinea, Egypt, Djibouti, Côte d'Ivoire,
Congo (Republic of the), Congo (Democratic Republic of the), Comoros, Chad, Central African Republic, Cape Verde (Cabo Verde), Cameroon,
Burundi, Burkina Faso, Botswana, Benin, Angola, Algeria"""
AFRICA = "\n".join(name.strip() for name in COUNTRIES.split(","))
ALPHABET = [f"{letter}pple appears here now." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
CAPITALS = """Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam, Warsaw,
London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana""".replace("\n", " ")
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{row},Japan,Tokyo,2023,78" for row in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "1,Home,{},99.99,150\n" + "\n".join(f"{row},Books,L'Oréal,1.5,3" for row in range(13))
STUDENTS = "\n".join(['"StudentID"\t "Subject"\t "Grade"\t "Semester"\t "Score"'] + ['"1"\t"Art, old"\t"A"\t"Fall"\t"99"'] * 3)
QUESTIONS = ["Which one{} is it?".format(" of these" * place) for place in range(4)]
OPTIONS = "A) Cubism\nB) Dada\nC) Pop\nD) Fauvism\nE) Op\n\n"
QUIZ = "".join(f"Question {place} (hard)\n{text}\n\n{OPTIONS}" for place, text in enumerate(QUESTIONS, start=1))

ROWS = [
    ("multiples", "14 21 28 35 42 49", True),
    ("multiples", "Sure! Here it is: 14,21,28,35,42,49", True),
    ("multiples", "7 14 21 28 35 42 49", False),
    ("mcq_count_length", QUIZ, True),
    ("mcq_count_length", QUIZ.replace("Question ", "").replace(" (hard)", "."), False),
    ("mcq_count_length", QUIZ[: QUIZ.index("Question 4")], False),
    ("mcq_count_length", QUIZ.replace("E) Op", ""), False),
    ("mcq_count_length", QUIZ[QUIZ.index("Question 2") :] + QUIZ[: QUIZ.index("Question 2")], False),
    ("mcq_count_length", "Here they are:\n" + QUIZ, False),
    ("reverse_newline", f"Sure! Here they are:\n{AFRICA}", True),
    ("reverse_newline", AFRICA[: AFRICA.index("Benin")], False),
    ("reverse_newline", AFRICA.replace("\n", ", "), False),
    ("reverse_newline", "\n".join(reversed(AFRICA.split("\n"))), False),
    ("reverse_newline", "Zimbabwe" + "\nY" * 60, False),
    ("word_reverse", ".US the of bird national the is eagle bald The.", True),
    ("word_reverse", "The bald eagle is the national bird of the US.", False),
    ("word_reverse", "yekurt", False),
    ("character_reverse", ".su eht fo lobmys lanoitan eht si elgae dlab", True),
    ("character_reverse", "The bald eagle is the national bird of the US.", False),
    ("sentence_alphabet", '"' + " ".join(ALPHABET), True),
    ("sentence_alphabet", "A long time ago. Bears ate. Cats ran. Dogs. enjoyed. food. " + " ".join(ALPHABET[6:]), True),
    ("sentence_alphabet", " ".join([ALPHABET[1], ALPHABET[0], *ALPHABET[2:]]), False),
    ("sentence_alphabet", " ".join(ALPHABET[:5]), False),
    ("sentence_alphabet", ". " * 26, False),
    ("european_capitals_sort", f"{CAPITALS}, Zagreb", True),
    ("european_capitals_sort", f"Zagreb, {CAPITALS}", False),
    ("european_capitals_sort", CAPITALS, False),
    ("csv_city", CITIES, True),
    ("csv_city", CITIES.replace(",Count", ""), False),
    ("csv_city", CITIES + "\nmissing,columns", False),
    ("csv_special_character", PRODUCTS.format('"Pottery Barn, Inc."'), True),
    ("csv_special_character", PRODUCTS.format('"Pottery Barn Inc"'), False),
    ("csv_special_character", PRODUCTS.format("L'Oréal"), False),
    ("csv_quotes", STUDENTS, True),
    ("csv_quotes", STUDENTS.replace('"Subject"', "Subject"), False),
    ("csv_quotes", STUDENTS.replace("\t", ","), False),
    ("date_format_list", "1796-07-05, 1800-12-31", True),
    ("date_format_list", "07-05-1796", False),
    ("date_format_list", "1800-02-29", False),
    ("date_format_list", "1805-12-02.", False),
]

CUSTOM = [{"name": f"custom:{name}", "arguments": {}, "response": response, "followed": followed} for name, response, followed in ROWS]
