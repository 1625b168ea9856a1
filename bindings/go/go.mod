module fourtuple.example/fourtuple

go 1.22
