package fourtuple

import (
	"encoding/json"
	"os"
	"reflect"
	"strconv"
	"testing"
)

// vectors is a file of bindings/vectors, which the Rust library computes.
type vectors struct {
	Strategy string
	Fields   []string
	Cases    [][]json.RawMessage
}

func TestStepsEqualTheVectors(t *testing.T) {
	for _, name := range []string{"kernel-default", "full-range", "select-test-repeat", "random-window", "auto"} {
		text, err := os.ReadFile("../vectors/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var file vectors
		if err := json.Unmarshal(text, &file); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if file.Strategy != name || len(file.Cases) != 1000 {
			t.Fatalf("%s: %q with %d cases", name, file.Strategy, len(file.Cases))
		}
		for i, values := range file.Cases {
			one := make(vectorCase)
			for j, field := range file.Fields {
				one[field] = values[j]
			}
			got, want := one.computed(t, name), one.steps(t)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%s, case %d: %s: got %+v", name, i, values, got)
			}
		}
	}
}

// vectorCase has the fields of a case by name.
type vectorCase map[string]json.RawMessage

func field[T any](t *testing.T, from vectorCase, name string) T {
	t.Helper()
	var value T
	if err := json.Unmarshal(from[name], &value); err != nil {
		t.Fatalf("%s: %s: %v", name, from[name], err)
	}
	return value
}

func (c vectorCase) strategy(t *testing.T, name string) Strategy {
	switch name {
	case "kernel-default":
		return KernelDefault{}
	case "full-range":
		return FullRange{}
	case "select-test-repeat":
		return SelectTestRepeat{Tries: field[uint16](t, c, "tries")}
	case "random-window":
		return RandomWindow{
			Width: field[uint16](t, c, "width"), Tries: field[uint16](t, c, "tries"), ThenFullRange: field[bool](t, c, "then_full_range"),
		}
	}
	found := map[string]LocalPortRange{"absent": Absent, "parity": Parity, "linear": Linear, "unproven": Unproven}
	return Auto{}.On(found[field[string](t, c, "found")], field[bool](t, c, "ports_known"))
}

// computed returns the steps of this package for the inputs of the case.
func (c vectorCase) computed(t *testing.T, name string) []Step {
	seed, err := strconv.ParseUint(field[string](t, c, "seed"), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	ports := PortRange{Low: field[uint16](t, c, "low"), High: field[uint16](t, c, "high")}
	strategy, random := c.strategy(t, name), NewRandom(seed)
	steps := []Step{}
	for tried := uint32(0); tried < field[uint32](t, c, "attempts"); tried++ {
		step, ok := strategy.Next(tried, ports, random)
		if !ok {
			break
		}
		steps = append(steps, step)
	}
	return steps
}

// steps returns the steps of the case: null is a search, [low, high] a window, a number a port to bind.
func (c vectorCase) steps(t *testing.T) []Step {
	steps := []Step{}
	for _, one := range field[[]any](t, c, "steps") {
		switch value := one.(type) {
		case nil:
			steps = append(steps, Step{Kind: Search})
		case float64:
			steps = append(steps, Step{Kind: Bind, Port: uint16(value)})
		case []any:
			window := PortRange{Low: uint16(value[0].(float64)), High: uint16(value[1].(float64))}
			steps = append(steps, Step{Kind: Window, Window: window})
		}
	}
	return steps
}

func TestNamesOfStrategiesAreRead(t *testing.T) {
	for _, name := range []string{"kernel-default", "select-test-repeat", "random-window:500", "full-range", "auto"} {
		strategy, err := ParseStrategy(name)
		if err != nil || strategy.String() != name {
			t.Errorf("%s: %v %v", name, strategy, err)
		}
	}
	for _, name := range []string{"", "random-window:0", "random-window:65536", "Full-Range"} {
		if strategy, err := ParseStrategy(name); err == nil {
			t.Errorf("%q is %v", name, strategy)
		}
	}
}

func TestRangesAndSourcesAreRead(t *testing.T) {
	for text, want := range map[string]PortRange{"32768-60999": {32768, 60999}, "32768\t60999\n": {32768, 60999}, "7-7": {7, 7}} {
		if got, err := ParsePortRange(text); err != nil || got != want {
			t.Errorf("%q: %v %v", text, got, err)
		}
	}
	for _, text := range []string{"", "9", "9-", "-9", "0-65536", "a-b", "1-2-3", "9-8"} {
		if got, err := ParsePortRange(text); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
	for text, want := range map[string]int{
		"127.0.0.1": 1, "127.0.0.0/28": 14, "127.0.0.0/30, 127.0.0.2,10.0.0.1": 3, "10.0.0.4/32": 1, "10.0.0.4/31": 2,
		"fd00::/124": 16, "127.0.0.0/20": 4094,
	} {
		if got, err := ParseSources(text); err != nil || len(got) != want {
			t.Errorf("%q: %d addresses, %v", text, len(got), err)
		}
	}
	for _, text := range []string{"", "eth0", "10.0.0.0/8", "::/0"} {
		if got, err := ParseSources(text); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}
